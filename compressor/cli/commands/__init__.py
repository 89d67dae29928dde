"""The commands of `moe-compress`."""
