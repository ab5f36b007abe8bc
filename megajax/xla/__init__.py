"""Tools for programs that XLA compiled; they know no model, and serve any JAX code."""
