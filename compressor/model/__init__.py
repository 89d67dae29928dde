"""What transformers says the files are, and one layer of it in memory at a time."""
