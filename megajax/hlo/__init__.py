"""Compiled programs, read: what runs, how often, what it sends and what it computes. Knows nothing of megajax's own step."""
