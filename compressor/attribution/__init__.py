"""Routing attribution: the influence of every earlier component on every router."""
