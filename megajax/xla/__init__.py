"""Tools for programs that XLA compiled. They depend on no model and work for any JAX code."""
