"""A model on paper: parameters, matmuls, FLOPs and the collectives of Megatron-LM."""
