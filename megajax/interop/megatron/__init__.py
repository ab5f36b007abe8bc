"""Megatron-LM's checkpoints."""
