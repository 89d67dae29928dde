"""Run a recipe: step by step, with resume, verification, gate and record."""
