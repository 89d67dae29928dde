"""Checkpoint files on disk or on the Hub, read lazily."""
