"""Models' answers to prompts and to the items of lm-eval's tasks."""
