"""The stock model of a checkpoint, and one layer of it in memory at a time."""
