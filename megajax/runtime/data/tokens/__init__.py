"""Token files in Megatron's format."""
