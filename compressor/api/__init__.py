"""What the command line does, as functions: plan, apply, compress, compare, attribute, gate, inspect."""
