"""One kit for every picture."""
