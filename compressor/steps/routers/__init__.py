"""The step that moves router weights or biases toward the base model."""
