"""The file of golden answers: prompts as token ids, the most probable next tokens, and what
rounding alone changes."""

import math
import reprlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from compressor.errors import CompressionError
from compressor.files import SUMS, check_parent
from compressor.frozen import frozen
from compressor.records import (
    RESTORE,
    Count,
    Finite,
    Json,
    plain_json,
    read_as,
    read_json,
    readable_json,
)

FORMAT = 3  # of the file
KEPT = 20  # log-probabilities of each position: the most that servers give
# kinds of rounding that are measured, the narrowest first
BANDS = ("bfloat16", "8-bit", "fp8", "4-bit")
MOST_BYTES = 2**24  # of a file
MOST_TOKENS = 2**16  # of all prompts, which are asked as they stand
TOO_PROBABLE = 0.01  # a log-probability, even of a rounded sum
LEAST = -30.0  # below this a log-probability says nothing, and servers write anything

Distance = Annotated[float, Field(ge=0, le=1e6)]  # in nats


@frozen
class Top:
    """The most probable next tokens after a position, the most probable first."""

    tokens: tuple[Count, ...]
    logs: tuple[Finite, ...]

    def distance(self, other: "Top") -> float:
        """Return the root of the mean square of the differences between log-probabilities, in nats.

        A token that only one of them has is at most as probable in the other as the last one there.
        """
        first = dict(zip(self.tokens, self.logs, strict=True))
        second = dict(zip(other.tokens, other.logs, strict=True))
        total = 0.0
        tokens = first.keys() | second.keys()
        for token in tokens:
            difference = max(first.get(token, self.logs[-1]), LEAST)
            difference -= max(second.get(token, other.logs[-1]), LEAST)
            if token not in first:
                difference = min(difference, 0.0)
            elif token not in second:
                difference = max(difference, 0.0)
            total += difference**2
        return math.sqrt(total / len(tokens))


@frozen
class GoldenPrompt:
    """Token ids, and what comes next after some of them."""

    ids: tuple[Count, ...]
    # of the tokens after which `top` comes; the last token is the last of them
    positions: tuple[Count, ...]
    top: tuple[Top, ...]
    text: str | None = None  # that was tokenised, or a user's message; None for ids that were drawn
    text_tokens: Count = 0  # of the text alone
    # of the text in the chat template, where the ids may be the first of them
    rendered_tokens: Count = 0
    tools: tuple[Any, ...] = ()
    continued: Count = 0  # ids at the end that the model itself chose greedily

    @property
    def given(self) -> tuple[int, ...]:
        """The ids that the model did not choose."""
        return self.ids[: len(self.ids) - self.continued]


@frozen
class GoldenAnswers:
    """Answers of one model."""

    format: int
    vocabulary: Annotated[int, Field(ge=1, le=2**31)]
    parameters: Count
    dtype: str  # that the answers were computed in
    rounds_inputs: bool  # loaders of its number format round activations, too: that is its `fp8`
    prompts: tuple[GoldenPrompt, ...]
    bands: Mapping[str, tuple[Distance, ...]]  # how far each kind of rounding moves each answer
    texts: Mapping[str, str]  # of the tokens among the answers, by id
    is_chat: bool  # texts are messages of a user, in the chat template
    config: Json  # its numbers and switches
    fingerprints: Mapping[str, str]  # of its weights, by tensor
    date: str | None = None  # in prompts whose template asks for it

    @property
    def top(self) -> tuple[Top, ...]:
        """The answers of all prompts, one after the other."""
        return tuple(top for prompt in self.prompts for top in prompt.top)

    @property
    def places(self) -> list[tuple[int, int]]:
        """The number of the prompt, and the position in it, of each answer."""
        return [
            (number, position)
            for number, prompt in enumerate(self.prompts)
            for position in prompt.positions
        ]

    @property
    def decoded(self) -> set[int]:
        """The numbers of the answers that come after tokens of the model's own."""
        places = enumerate(self.places)
        return {
            number
            for number, (prompt, position) in places
            if position >= len(self.prompts[prompt].given)
        }


def golden_json(golden: GoldenAnswers) -> str:
    """Return the text of a file of golden answers."""
    return readable_json(plain_json(golden))


def check_target(path: Path, overwrite: bool) -> None:
    """Refuse a file for golden answers that exists, or whose digest another one holds."""
    if path.exists() and (path.parent / SUMS).is_file():
        raise CompressionError(
            f"the digest of {path} is in {SUMS}; write to another file with --output"
        )
    if path.exists() and not overwrite:
        raise CompressionError(f"{path} exists already; name another file or pass --overwrite")
    check_parent(path, "file with --output")


def read_golden(path: Path) -> GoldenAnswers:
    """Read golden answers; raises `CompressionError` for a file of another version, or that holds
    something else."""
    content = read_json(path, RESTORE, RESTORE, MOST_BYTES)
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        shown = reprlib.repr(found)
        raise CompressionError(
            f"{path} holds golden answers of format {shown}, and this version reads format "
            f"{FORMAT}; write them anew "
            f"with `moe-compress check --write MODEL`, or use the version that wrote them"
        )
    golden = read_as(GoldenAnswers, content, f"{path}: ")
    if not _is_possible(golden):
        raise CompressionError(f"{path} holds answers that no model can have given; {RESTORE}")
    return golden


def _is_possible(golden: GoldenAnswers) -> bool:
    """Return True if counts agree, and tokens, positions and log-probabilities are possible."""
    count = len(golden.places)
    sizes = {name: len(distances) for name, distances in golden.bands.items()}
    if not count or sizes != dict.fromkeys(BANDS, count):
        return False
    if sum(len(prompt.ids) for prompt in golden.prompts) > MOST_TOKENS:
        return False
    if not all(text.isdecimal() and len(text) < 12 for text in golden.texts):
        return False
    for prompt in golden.prompts:
        length = len(prompt.ids)
        positions = prompt.positions
        if len(prompt.top) != len(positions) or prompt.continued >= max(length, 1):
            return False
        if list(positions) != sorted({*positions}) or max(positions, default=0) >= length:
            return False
        for top in prompt.top:
            if not len(top.logs) == len(top.tokens) == len({*top.tokens}) > 0:
                return False
            if max(top.logs) > TOO_PROBABLE:
                return False
        tokens = chain(prompt.ids, *(top.tokens for top in prompt.top))
        if max(tokens) >= golden.vocabulary:
            return False
    return True
