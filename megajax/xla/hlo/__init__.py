"""Readers of compiled programs: what runs, how often, what it sends and what it computes.

Nothing here depends on megajax's own step.
"""
