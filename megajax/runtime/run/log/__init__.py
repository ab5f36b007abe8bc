"""The log of a run: terminal, metrics and trackers."""
