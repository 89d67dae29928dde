"""The gate: statistics, conditions and verdict on what compression cost."""
