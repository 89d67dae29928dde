"""How far models are from their base on text."""
