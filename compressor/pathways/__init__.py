"""C3PO: the experts that tokens are routed to, changed at test time, or for good by a bias of the routers."""
