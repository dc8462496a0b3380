"""The embedded defaults of the trials: samples fetched on request, their readers, and generators."""
