"""Decide which experts stay, merge or go."""
