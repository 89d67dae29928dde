"""Refitting what is left until each layer puts out what it did before."""
