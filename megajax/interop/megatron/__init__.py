"""Convert models from and to Megatron-LM's checkpoints."""
