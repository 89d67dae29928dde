"""The demo skills as lm-eval tasks; the YAML files name the functions of `loader`."""
