"""Calibration text in files, and tokenizers whose tokens can be told from the text; test support."""

import random
from pathlib import Path
from typing import Any

import torch

from compressor.data.batches import Calibration, WeightedSource, calibrate
from tests.support import small

TOKENIZER = small.tokenizer(small.CHAT)
END = 2  # </s>
VOCAB = 100_000  # of `Numbers`


def run(path: Path | str | list[WeightedSource], tokenizer: Any = TOKENIZER, **settings: Any) -> Calibration:
    """Calibrate with a tiny model's tokenizer."""
    wanted = {"samples": 4, "length": 8, "seed": 0, "vocab": small.VOCABULARY} | settings
    return calibrate(path if isinstance(path, list) else str(path), tokenizer, **wanted)


def write(folder: Path, content: str | bytes, name: str = "data.txt") -> Path:
    """A file with this content."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def decode(calibration: Calibration) -> str:
    """The text of all batches, one after the other."""
    ids = torch.cat([batch.reshape(-1) for batch in calibration.batches])
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


class Words:
    """A tokenizer with one token a character."""

    def __init__(self, end: int | None) -> None:
        self.eos_token_id = end

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 90 + 3 for letter in text], "special_tokens_mask": [0] * len(text)}


class Numbers:
    """A tokenizer whose token is the number that a word says."""

    eos_token_id = None

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        words = text.split()
        return {"input_ids": [int(word) for word in words], "special_tokens_mask": [0] * len(words)}


def count_up(folder: Path, source: int, tokens: int) -> str:
    """A file of documents of three numbers that no other place has; returns its name."""
    numbers = [str(source * 10_000 + number) for number in range(tokens)]
    parts = [" ".join(numbers[begin : begin + 3]) for begin in range(0, tokens, 3)]
    return str(write(folder, "\n\n".join(parts), f"s{source}.txt"))


def stream_of(source: str, seed: int = 3) -> list[int]:
    """All tokens of such a file in the order of the seed."""
    parts = Path(source).read_text().split("\n\n")
    random.Random(seed).shuffle(parts)
    return [int(word) for part in parts for word in part.split()]


def numbered(sources: list[WeightedSource] | str, **settings: Any) -> Calibration:
    """Calibrate with the numbers that files hold."""
    return calibrate(sources, Numbers(), **{"samples": 4, "length": 8, "seed": 3, "vocab": VOCAB} | settings)
