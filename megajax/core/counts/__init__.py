"""A model on paper: parameters, products, FLOPs and the collectives of Megatron-LM."""
