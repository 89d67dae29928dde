"""Calibration: sequences against a naive loop, several sources, held-out and reserved parts, and repetition."""

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.data.batches import (
    Calibration,
    WeightedSource,
    evaluation_sets,
    repeat_text,
    sample_positions,
)
from compressor.errors import CompressionError
from compressor.model.tokenizer import load_tokenizer
from tests.support import small
from tests.support.texts import END, TOKENIZER, VOCAB, Numbers, Words, count_up, numbered, run, stream_of, write


def fit_tokens(data: Calibration) -> int:
    return sum(batch.numel() for number, batch in enumerate(data.batches) if number not in data.heldout)


def test_too_little_text_and_impossible_sizes(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    with pytest.raises(CompressionError, match="gives 1 tokens; give it more text"):
        run(write(tmp_path, '{"text": "a"}', "b.jsonl"), Words(None))
    with pytest.raises(CompressionError, match="--samples 0 and --sequence-length 8 leave nothing"):
        run(path, samples=0)
    with pytest.raises(CompressionError, match="leave nothing to run"):
        run(path, length=1)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=r"the tokenizer makes token \d+, the model knows 50"):
        run(write(tmp_path, "zzzzzz"), vocab=50)
    with pytest.raises(CompressionError, match="has no usable tokenizer"):
        load_tokenizer(tmp_path)


def test_short_data_is_used_whole_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calibration = run(write(tmp_path, "abc"), samples=4, length=100)
    assert [tuple(batch.shape) for batch in calibration.batches] == [(1, 5)]
    assert calibration.tokens == 5
    assert "fills 5 of 400 tokens" in caplog.text


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 5))
def test_sampled_positions(tokens: int, count: int, seed: int) -> None:
    found = sample_positions(tokens, count, seed).tolist()
    assert found == sorted(set(found)) and len(found) == min(tokens, count)
    assert all(0 <= position < tokens for position in found)
    assert found == sample_positions(tokens, count, seed).tolist()


@pytest.mark.parametrize("samples", [3, 99])
def test_a_plain_calibration_is_what_it_was(samples: int, tmp_path: Path) -> None:
    path = write(tmp_path, small.TEXT)
    documents = [part.strip("\n") + "\n" for part in small.TEXT.split("\n\n")]
    random.Random(7).shuffle(documents)
    stream = [token for text in documents for token in [*TOKENIZER(text)["input_ids"], END]]
    stream = stream[: min(samples, len(stream) // 50) * 50]
    found = run(path, samples=samples, length=50, seed=7)
    digest = hashlib.sha256(struct.pack(f"<{len(stream)}q", *stream)).hexdigest()
    plain = {"source": str(path), "samples": len(stream) // 50, "sequence_length": 50, "tokens": len(stream)}
    assert found.identity.items() >= (plain | {"seed": 7, "sha256": digest}).items()
    assert [len(batch) for batch in found.batches[:-1]] == [8] * (len(found.batches) - 1)
    assert (found.heldout, found.reserved, set(found.sources), found.weights) == (frozenset(), (), {0}, (1.0,))
    assert fit_tokens(found) == found.tokens == len(stream)
    assert found.identity["sources"] == [
        {"source": str(path), "weight": 1.0, "samples": len(stream) // 50, "tokens": len(stream), "heldout_samples": 0}
        | {"sha256": digest}
    ]


def test_heldout_counts_by_hand(tmp_path: Path) -> None:
    text = count_up(tmp_path, 0, 900)
    for samples, share, expected in ((8, 0.25, 2), (8, 0.01, 1), (2, 0.99, 1), (6, 0.25, 2), (10, 0.0, 0)):
        made = numbered(text, samples=samples, heldout=share)
        assert made.identity["sources"][0]["heldout_samples"] == expected
        assert sum(len(made.batches[number]) for number in made.heldout) == expected
        assert fit_tokens(made) == 8 * (samples - expected)
    plain = numbered(text, samples=8)
    assert numbered(text, samples=8, heldout=0.5).identity["sha256"] == plain.identity["sha256"]
    assert numbered(text, samples=8, reserve=5).identity["sha256"] == plain.identity["sha256"]


def test_at_least_one_of_several_sources_is_held_out(tmp_path: Path) -> None:
    sources = [WeightedSource(count_up(tmp_path, number, 900), 1.0 + number) for number in range(3)]
    made = numbered(sources, samples=12, heldout=0.01)  # 2, 4 and 6 sequences: none is due a whole one
    assert [entry["heldout_samples"] for entry in made.identity["sources"]] == [0, 0, 1]
    assert [entry["samples"] for entry in made.identity["sources"]] == [2, 4, 6]


def test_a_single_sequence_is_cut_in_two(tmp_path: Path) -> None:
    made = numbered(count_up(tmp_path, 0, 900), samples=1, length=10, heldout=0.1)
    assert [tuple(batch.shape) for batch in made.batches] == [(1, 8), (1, 2)]
    assert made.heldout == {1} and made.tokens == 10 and made.identity["sequence_length"] == 8
    tiny = numbered(count_up(tmp_path, 1, 12), samples=99, length=512, heldout=0.1, reserve=50)
    assert [batch.numel() for batch in (*tiny.batches, *tiny.reserved[0].batches)] == [7, 2, 3]
    with pytest.raises(CompressionError, match=r"s2.txt gives 7 tokens, too few .* give it more text, 8 tokens"):
        numbered(count_up(tmp_path, 2, 7), length=100, heldout=0.1)
    with pytest.raises(CompressionError, match=r"s2.txt gives 7 tokens, too few"):
        numbered(str(tmp_path / "s2.txt"), length=100, reserve=1)
    assert numbered(str(tmp_path / "s2.txt"), length=100).tokens == 7


def test_short_sources_are_shared_out_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = numbered(count_up(tmp_path, 0, 80), samples=12, reserve=4)
    assert "s0.txt fills 80 of 128 tokens asked for" in caplog.text
    assert made.tokens == 64 and sum(len(batch) for batch in made.reserved[0].batches) == 2
    assert len(caplog.records) == 1
    numbered(str(tmp_path / "s0.txt"), samples=8, reserve=2)
    assert len(caplog.records) == 1


def test_evaluation_sets_are_packed_like_calibration(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    names = [count_up(tmp_path, 0, 100), count_up(tmp_path / "other", 0, 20), count_up(tmp_path, 1, 5)]
    found = evaluation_sets(names, Numbers(), length=8, seed=3, vocab=VOCAB, most=9)
    assert [each.name for each in found] == ["s0", "s0-2", "s1"]
    for each, name, tokens in zip(found, names, (72, 16, 5), strict=True):
        assert torch.cat([batch.flatten() for batch in each.batches]).tolist() == stream_of(name)[:tokens]
    with pytest.raises(CompressionError, match="the tokenizer makes token 99, the model knows 99"):
        evaluation_sets(names[:1], Numbers(), length=100, seed=3, vocab=99, most=1)


def mixed(folder: Path, **settings: Any) -> Calibration:
    sources = [WeightedSource(count_up(folder, 0, 400), 0.7), WeightedSource(count_up(folder, 1, 30), 0.3)]
    return numbered(sources, **{"samples": 11, "heldout": 0.2, "reserve": 4} | settings)


def as_stored(calibration: Calibration) -> dict[str, Any]:
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


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no sources": (lambda c: c.pop("sources"), r"cannot be repeated \('sources'\); restore the plan or plan again"),
    "sources of text": (lambda c: c.update(sources=["s0.txt"]), "cannot be repeated .*sources.0"),
    "no weight": (lambda c: c["sources"][1].pop("weight"), "cannot be repeated .*sources.1.weight"),
    "bad weight": (lambda c: c["sources"][1].update(weight=-1.0), "has weight -1.0; give a positive number"),
    "other weight": (lambda c: c["sources"][1].update(weight=3.0), "no longer gives the tokens"),
    "no seed": (lambda c: c.pop("seed"), "cannot be repeated .*seed"),
    "other seed": (lambda c: c.update(seed=9), "s0.txt no longer gives the tokens"),
    "no samples": (lambda c: c["asked"].pop("samples"), "cannot be repeated .*samples"),
    "other samples": (lambda c: c["asked"].update(samples=5), "no longer gives the tokens"),
    "no heldout": (lambda c: c.pop("heldout"), "cannot be repeated .*heldout"),
    "other heldout": (lambda c: c.update(heldout=0.5), "calibration has 'sources' that do not"),
    "tokens": (lambda c: c.update(tokens=5), "calibration has 'tokens' that do not"),
    "digest": (lambda c: c.update(sha256="0"), "calibration has 'sha256' that do not"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_calibration_is_refused(edit: str, tmp_path: Path) -> None:
    change, message = EDITS[edit]
    stored = as_stored(mixed(tmp_path))
    change(stored)
    with pytest.raises(CompressionError, match=message):
        repeat_text(stored, Numbers(), VOCAB)
