"""Options of commands on items with answers, such as `reference` and `comoe train`."""

from pathlib import Path
from typing import Annotated, Any

from compressor.cli.options import options_of
from compressor.extras import TASKS, require
from compressor.options import Names, Options


class ItemFlags(Options):
    """Items that a model answers."""

    tasks: Names = ()
    """lm-eval tasks of multiple choice, separated by commas; `comoe train` takes their training
    splits."""
    file: Path | None = None
    """Instead: a JSONL file with prompt, answer and, of multiple choice, choices; task names it."""
    limit: int | None = None
    """Items of each task, the first ones (default: all)."""
    include_path: Path | None = None
    """A folder with lm-eval task files of your own."""
    strict: bool = False
    """End at an item that cannot be used, instead of leaving it out."""

    def check_packages(self) -> None:
        """Refuse tasks without lm-eval."""
        if self.tasks:
            require(*TASKS)

    def arguments(self, file: str) -> dict[str, Any]:
        """Return the arguments of a function that reads items, with its name for their file."""
        return {
            **self.model_dump(exclude={"file"}),
            file: self.file,
        }


Items = Annotated[ItemFlags, options_of(ItemFlags, names={"file": "calibration"})]
HeldoutItems = Annotated[ItemFlags, options_of(ItemFlags, names={"file": "heldout"})]
