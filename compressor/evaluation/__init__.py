"""A model's answers to the items of lm-eval's tasks."""
