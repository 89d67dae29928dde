"""Measurements of speed, memory and quality; every figure is a ratio within one run. `frame` has what all share."""
