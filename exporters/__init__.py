"""Ways to write a compressed model, found by the core through entry points."""
