"""The error for a program whose text cannot be parsed."""


class HloError(ValueError):
    """HLO text that cannot be parsed; the message quotes the line."""
