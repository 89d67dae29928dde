"""The step that trains a smaller model toward its base."""
