"""Divergence of models from their base on text."""
