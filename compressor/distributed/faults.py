"""How a rank ends when another one does: by the fault that was told, or as if it had been killed itself."""

from compressor.errors import CompressionError

AGAIN = "run the same command again, with any number of ranks, to go on"


class EndedError(CompressionError):
    """A fault of another rank that a user can mend: what is here is cleared away as for a fault of this one."""


class LostRankError(BaseException):
    """Another rank is gone. No `Exception`: as after a kill, what has been done is left to the run that goes on."""
