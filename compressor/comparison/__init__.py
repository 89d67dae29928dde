"""Many plans, one table."""
