"""Where a long job tells how far it is; silent unless somebody listens."""

from typing import Protocol


class Progress(Protocol):
    """A listener: `start` opens a phase of `total` steps, `advance` finishes one of them."""

    def start(self, phase: str, total: int) -> None: ...

    def advance(self, detail: str) -> None: ...


class Silent:
    """Listens to nothing."""

    def start(self, phase: str, total: int) -> None:
        """Ignore a phase."""

    def advance(self, detail: str) -> None:
        """Ignore a step."""
