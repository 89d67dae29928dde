"""How long a run will take on this machine: a short measurement of it, and a count of the work."""
