"""The embedded demo checkpoint: its synthetic skills, its data and how it is scored."""
