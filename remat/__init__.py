"""JAX-style functional rematerialization for PyTorch."""
