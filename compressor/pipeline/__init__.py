"""Run a recipe: steps in stages, with resume, verification, gate and record."""
