"""Several processes that share one run, on torch.distributed."""
