"""From a plan and the base's tensors to the output's tensors."""
