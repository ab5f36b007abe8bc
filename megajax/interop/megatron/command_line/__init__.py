"""Megatron-LM's command lines, read as configs. Imports no jax."""
