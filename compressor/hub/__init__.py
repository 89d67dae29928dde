"""A verified folder on the Hugging Face Hub."""
