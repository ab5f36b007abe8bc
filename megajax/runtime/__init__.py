"""Runs of a step: data, processes, checkpoints, the loop, generation and evaluation."""
