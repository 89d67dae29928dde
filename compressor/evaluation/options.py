"""How models are evaluated, checked before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError
from compressor.model.opened import DTYPES, pick_device

SEED = 1234  # lm-eval's own for drawing few-shot examples


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What is asked of a model, and how."""

    tasks: tuple[str, ...]  # names of lm-eval tasks, groups or tags
    limit: int | None = None  # the first items of each task, and of each part of a group
    include_path: Path | None = None  # a folder with the user's own task definitions
    batch_size: int | str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    num_fewshot: int | None = None  # None leaves it to each task
    seed: int = SEED

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if not self.tasks or not all(name.strip() for name in self.tasks):
            raise CompressionError("no task is named; give --tasks a list such as boolq,rte")
        if repeated := [name for name in self.tasks if self.tasks.count(name) > 1]:
            raise CompressionError(f"task {repeated[0]!r} is named twice; name each task once")
        if self.limit is not None and self.limit < 1:
            raise CompressionError(f"--limit {self.limit} leaves no items; give at least 1")
        if self.batch_size != "auto" and (not isinstance(self.batch_size, int) or self.batch_size < 1):
            raise CompressionError(f"--batch-size {self.batch_size} is neither auto nor a number of at least 1")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise CompressionError(f"there is no dtype {self.dtype!r}; known are auto, {', '.join(DTYPES)}")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise CompressionError(f"{self.num_fewshot} few-shot examples cannot be given; ask for 0 or more")
        if self.include_path is not None and not self.include_path.is_dir():
            raise CompressionError(f"{self.include_path} is not a folder; give --include-path a folder of task files")

    def facts(self) -> dict[str, Any]:
        """What decides the results beside model and tasks; where definitions lie does not, what they say does."""
        return {
            "limit": self.limit,
            "batch_size": self.batch_size,
            "device": pick_device(self.device).type,
            "dtype": self.dtype,
            "num_fewshot": self.num_fewshot,
            "seed": self.seed,
        }


def read_batch_size(text: str) -> int | str:
    """'auto' or a number, as the command line gives it."""
    return int(text) if text.strip().isdecimal() else text.strip()
