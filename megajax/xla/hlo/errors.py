"""The error of a program whose text is not understood."""


class HloError(ValueError):
    """An HLO text that is not understood; the message quotes the line."""
