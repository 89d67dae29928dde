"""Golden answers: what a model says to a few prompts, by which a copy of it anywhere is known."""
