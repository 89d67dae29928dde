"""Fewer bits for each weight: rounding to nearest or GPTQ, stored as compressed-tensors store
them."""
