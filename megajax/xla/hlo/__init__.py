"""Read compiled programs: which instructions run, how often, what they send and compute.

This package does not depend on megajax's own step.
"""
