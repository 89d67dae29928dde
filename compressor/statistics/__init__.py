"""What is measured of MoE layers while text passes them."""
