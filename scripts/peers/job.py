"""What one process is asked to do, and what it tells, as files of JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """One method on one checkpoint, in a process of its own."""

    method: str
    model: str  # a Mixtral checkpoint in float32
    tokens: str  # a file of torch's with the list of calibration batches, int64 [B, L]
    text: str  # the same as text, for us, who read text
    samples: int
    length: int
    keep: int  # experts, or groups of experts, that are left in every layer
    out: str  # a folder that does not exist yet
    peer: str | None = None  # the checkout of the other project


@dataclass(frozen=True, slots=True)
class Told:
    """What a process found: seconds of its phases, bytes, and which experts became one in every layer."""

    seconds: dict[str, float]
    cpu: float  # seconds of the processor in those phases, of all threads
    resident: int  # the highest resident memory of the process, pages of mapped files included
    stored: int  # bytes of the weights as the method itself stores them
    groups: list[list[list[int]]] = field(
        default_factory=list
    )  # [layer][group][expert]; what is dropped is in none
    tokens: str = ""  # SHA-256 of the token ids that were calibrated with

    @property
    def total(self) -> float:
        """Seconds from opening the checkpoint to the finished output."""
        return sum(self.seconds.values())


def write(file: Path, record: Job | Told) -> None:
    """As JSON."""
    file.write_text(json.dumps(asdict(record)))


def read(file: Path, kind: type[Any]) -> Any:
    """A record of this kind."""
    return kind(**json.loads(file.read_text()))
