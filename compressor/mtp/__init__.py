"""Multi-token-prediction heads: which tensors they are, and each as a model of one decoder layer."""
