"""Constants for what is dropped, and layers that keep different numbers of experts."""
