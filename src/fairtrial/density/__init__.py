"""Densities: simulation-based inference, flows and sources."""
