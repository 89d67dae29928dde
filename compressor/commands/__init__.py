"""The commands of `moe-compress`: what they take, and what they show."""
