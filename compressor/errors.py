"""The one exception meant for users."""


class CompressionError(Exception):
    """A fault a user can mend, told in one sentence."""
