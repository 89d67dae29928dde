"""What steers the routers: which earlier component writes what into whose routing."""
