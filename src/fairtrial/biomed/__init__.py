"""Slides, cells and medicine."""
