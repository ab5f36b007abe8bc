"""Convert models from and to Hugging Face and Megatron-LM."""
