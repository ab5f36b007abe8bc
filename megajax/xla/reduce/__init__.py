"""Reduce a module that XLA miscompiles to a few instructions of HLO."""
