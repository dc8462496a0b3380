"""Adapting pretrained models."""
