"""A journal of answers: each is kept as it comes, so that a run which is killed asks nothing
twice."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from compressor.files import wrap_full_disk
from compressor.records import plain_json


@dataclass(frozen=True, slots=True)
class Journal:
    """JSON lines of one type."""

    path: Path
    kind: TypeAdapter[Any]

    def read(self) -> Iterator[Any]:
        """Yield the entries that there are; those that cannot be read are left out."""
        with suppress(FileNotFoundError), self.path.open("rb") as stream:
            for line in stream:
                with suppress(ValueError):  # a line that was cut off
                    yield self.kind.validate_json(line)

    def add(self, entry: Any) -> None:
        """Append an entry."""
        with wrap_full_disk(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                # the last line may have been cut off
                stream.write(f"\n{json.dumps(plain_json(entry))}")
