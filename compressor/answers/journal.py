"""A journal of answers: each is kept as it comes, so that a run which is killed asks nothing
twice."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from compressor.files import wrap_full_disk
from compressor.frozen import frozen
from compressor.records import plain_json


@frozen
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


def keep(
    journal: Journal | None,
    keys: Sequence[str],
    ask: Callable[[Sequence[int]], Iterable[tuple[int, Any]]],
) -> list[Any]:
    """Return the answer to each key; what the journal has, as pairs of key and answer, is not asked
    again.

    `ask` gets the numbers of the others, and yields answers after their place among these."""
    known = {} if journal is None else dict(journal.read())
    answers = [known.get(key) for key in keys]
    missing = [number for number, key in enumerate(keys) if key not in known]
    for place, answer in ask(missing) if missing else ():
        if journal is not None:
            journal.add((keys[missing[place]], answer))
        answers[missing[place]] = answer
    return answers
