"""From a plan and the source's tensors to the output's tensors."""
