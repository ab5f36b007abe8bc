"""Descriptions of GPUs, for the plan and the compiler; no GPU needs to be present."""
