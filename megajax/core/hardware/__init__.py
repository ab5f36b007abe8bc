"""Descriptions of GPUs, for the plan and the compiler; they work without the GPU."""
