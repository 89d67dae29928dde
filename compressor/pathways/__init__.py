"""Which experts a token visits, changed after the fact: at test time, or for good in the routers (C3PO)."""
