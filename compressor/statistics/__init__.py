"""Measurements of MoE layers while text passes them."""
