"""Reconstruction: the remaining experts refitted until each layer outputs what it did before."""
