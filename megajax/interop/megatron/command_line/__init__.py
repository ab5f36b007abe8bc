"""Convert Megatron-LM's command lines to configs. Imports no jax."""
