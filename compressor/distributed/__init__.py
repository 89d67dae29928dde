"""Several processes that do one run together, on torch.distributed."""
