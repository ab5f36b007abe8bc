"""What is raised where the text of a program is not understood."""


class HloError(ValueError):
    """An HLO text that is not understood; the message has the line."""
