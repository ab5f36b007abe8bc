"""The first named site at which the passes of two models, meshes or versions differ.

A pass is one forward and one backward pass over the same batch. `sources.py` reads both sides,
`execute.py` computes their numbers, `difference.py` compares them.
"""
