"""Tables for terminals and notebooks."""
