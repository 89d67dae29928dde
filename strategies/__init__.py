"""Built-in strategies, found by the core through entry points like anybody else's."""
