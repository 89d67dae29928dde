"""A plan's calibration, repeated from the file, and refused when a source or the plan has changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.data.batches import Calibration, WeightedSource, repeat_text
from compressor.errors import CompressionError
from tests.texts import VOCAB, Numbers, count_up, numbered


def mixed(folder: Path, **settings: Any) -> Calibration:
    sources = [WeightedSource(count_up(folder, 0, 400), 0.7), WeightedSource(count_up(folder, 1, 30), 0.3)]
    return numbered(sources, **{"samples": 11, "heldout": 0.2, "reserve": 4} | settings)


def as_stored(calibration: Calibration) -> dict[str, Any]:
    """The identity as a plan file gives it back."""
    content: dict[str, Any] = json.loads(json.dumps(calibration.identity))
    return content


@pytest.mark.parametrize("settings", [{}, {"heldout": 0, "reserve": 0}, {"samples": 2, "reserve": 2}, {"length": 300}])
def test_a_calibration_can_be_repeated(settings: dict[str, Any], tmp_path: Path) -> None:
    made = mixed(tmp_path, **settings)
    again = repeat_text(as_stored(made), Numbers(), VOCAB).fit
    assert again.identity == made.identity
    assert (again.sources, again.weights, again.heldout) == (made.sources, made.weights, made.heldout)
    pairs = [(made.batches, again.batches)]
    pairs += [(one.batches, two.batches) for one, two in zip(made.reserved, again.reserved, strict=True)]
    for first, second in pairs:
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_a_changed_source_is_named(tmp_path: Path) -> None:
    stored = as_stored(mixed(tmp_path))
    count_up(tmp_path, 0, 500)
    with pytest.raises(CompressionError, match=r"s0.txt no longer gives the tokens that the plan was made with"):
        repeat_text(stored, Numbers(), VOCAB)
    count_up(tmp_path, 0, 400)
    assert repeat_text(stored, Numbers(), VOCAB).identity == stored
    (tmp_path / "s1.txt").write_text("5 " * 30)
    with pytest.raises(CompressionError, match=r"s1.txt no longer gives"):
        repeat_text(stored, Numbers(), VOCAB)
    (tmp_path / "s1.txt").unlink()
    with pytest.raises(CompressionError, match=r"s1.txt does not exist"):
        repeat_text(stored, Numbers(), VOCAB)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "older": (lambda c: [c.pop("asked"), c.pop("sources")], "has no usable 'asked' .* plan again"),
    "no sources": (lambda c: c.pop("sources"), "has no usable 'sources'"),
    "sources empty": (lambda c: c.update(sources=[]), "no calibration source is given"),
    "sources of text": (lambda c: c.update(sources=["s0.txt"]), "has no usable 'sha256'"),
    "no weight": (lambda c: c["sources"][1].pop("weight"), "has no usable 'weight'"),
    "bad weight": (lambda c: c["sources"][1].update(weight=-1.0), "has weight -1.0; give a positive number"),
    "other weight": (lambda c: c["sources"][1].update(weight=3.0), "no longer gives the tokens"),
    "no seed": (lambda c: c.pop("seed"), "has no usable 'seed'"),
    "seed of text": (lambda c: c.update(seed="0"), "has no usable 'seed'"),
    "other seed": (lambda c: c.update(seed=9), "s0.txt no longer gives the tokens"),
    "no samples": (lambda c: c["asked"].pop("samples"), "has no usable 'samples'"),
    "other samples": (lambda c: c["asked"].update(samples=5), "no longer gives the tokens"),
    "no heldout": (lambda c: c.pop("heldout"), "has no usable 'heldout'"),
    "other heldout": (lambda c: c.update(heldout=0.5), "s0.txt says 'heldout_samples' is 2, but repeating it gives 4"),
    "tokens": (lambda c: c.update(tokens=5), "calibration says 'tokens' is 5, but repeating it gives"),
    "digest": (lambda c: c.update(sha256="0"), "calibration says 'sha256' is '0'"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_calibration_is_refused(edit: str, tmp_path: Path) -> None:
    change, message = EDITS[edit]
    stored = as_stored(mixed(tmp_path))
    change(stored)
    with pytest.raises(CompressionError, match=message):
        repeat_text(stored, Numbers(), VOCAB)
