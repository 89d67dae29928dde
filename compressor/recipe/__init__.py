"""Recipes and plans: data that can be read, edited, checked and carried out."""
