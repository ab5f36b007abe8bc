"""The first named site at which the passes of two models, meshes or versions differ.

A pass is one forward and one backward pass over the same batch. `sides.py` reads what is compared,
`execute.py` computes its numbers, `difference.py` compares them.
"""
