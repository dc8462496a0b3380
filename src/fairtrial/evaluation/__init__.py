"""Trusting a number."""
