"""Each routed expert as several narrower ones that compute the same."""
