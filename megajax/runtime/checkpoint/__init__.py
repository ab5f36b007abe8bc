"""Checkpoints of a run: written, verified, compared, retained and opened."""
