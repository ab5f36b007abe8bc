"""Descriptions of GPUs, for `plan` and the compiler; no GPU is needed to use them."""
