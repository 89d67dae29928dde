"""Text with parts: against packing written out again here, short text, several sources, and repetition."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from compressor.data.batches import TextBatches, TextSpec, calibrate, read_text, repeat_text
from compressor.data.emphasis import Emphasis, MarkedTokens
from compressor.data.sources import TextPart, WeightedSource, divide
from compressor.errors import CompressionError
from tests.support import small
from tests.support.texts import VOCAB, Numbers, count_up, run, stream_of, write

PARTS = {"routers": TextPart(20, 4, rows=3), "distill": TextPart(31, 6, minimum=2)}


def spec(sources: Sequence[WeightedSource], **more: Any) -> TextSpec:
    wanted = {"samples": 12, "sequence_length": 8, "seed": 3, "heldout": 0.25, "reserve": 3, "parts": PARTS}
    return TextSpec(tuple(sources), **{**wanted, **more})


def read(sources: Sequence[WeightedSource], **more: Any) -> TextBatches:
    return read_text(spec(sources, **more), Numbers(), VOCAB)


def flat(batches: Iterable[Tensor], source: int) -> list[int]:
    """The tokens of one source, which its numbers tell."""
    return [token for batch in batches for token in batch.flatten().tolist() if token // 10_000 == source]


def heldout_batches(text: TextBatches) -> list[Tensor]:
    return [batch for each in text.heldout for batch in each.batches]


def reserved_batches(text: TextBatches) -> list[Tensor]:
    return [batch for each in text.fit.reserved for batch in each.batches]


sources_of = st.lists(st.sampled_from([0.2, 1.0, 4.0]), min_size=1, max_size=3)


@given(
    weights=sources_of, samples=st.integers(3, 20) | st.just(80), share=st.sampled_from([0.0, 0.25, 0.9]),
    reserve=st.sampled_from([0, 3, 7]), first=st.integers(1, 40), second=st.integers(1, 40),
)  # fmt: skip
def test_parts_follow_each_other_where_the_text_suffices(
    weights: list[float], samples: int, share: float, reserve: int, first: int, second: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("numbers")
    sources = [WeightedSource(count_up(folder, number, 2000), weight) for number, weight in enumerate(weights)]
    parts = {"a": TextPart(first, 4, rows=3), "b": TextPart(second, 6)}
    made = read(sources, samples=samples, heldout=share, reserve=reserve, parts=parts)
    held, count = heldout_batches(made), len(sources)
    assert all(map(len, held))
    for number, entry in enumerate(sources):
        fit = flat((made.fit.batches[place] for place in made.fit.fit), number)
        own = flat(made.fit.heldout_batches, number)
        reserved = flat(reserved_batches(made), number)
        trained = [flat(made.parts[name], number) for name in parts]
        behind = flat(held, number)[len(own) :]
        together = fit + own + reserved + trained[0] + trained[1] + behind
        assert together == stream_of(entry.source)[: len(together)]  # each number is there once: no part overlaps
        assert flat(held, number)[: len(own)] == own
        assert len(fit + own) == 8 * divide(samples, weights)[number]
        assert len(reserved) == (8 * divide(reserve, weights)[number] if reserve else 0)
        for part, tokens in zip(parts.values(), trained, strict=True):
            assert len(tokens) == part.length * divide(max(part.sequences, count), weights)[number]
    assert 48 <= sum(map(len, held)) < 48 + len(sources) or len(held) == len(made.fit.heldout_batches)
    assert {batch.shape[1] for batch in held[: len(made.fit.heldout_batches)]} <= {8, 6, 4, 2}
    for name, length, rows in (("a", 4, 3), ("b", 6, 8)):
        assert all(batch.shape[1] == length and 1 <= len(batch) <= rows for batch in made.parts[name])


@given(
    sizes=st.lists(st.integers(20, 900), min_size=1, max_size=3), share=st.sampled_from([0.0, 0.25]),
    samples=st.sampled_from([0, 3, 12]), order=st.permutations(list(PARTS)),
)  # fmt: skip
def test_held_out_text_is_never_trained_on(
    sizes: list[int], share: float, samples: int, order: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("numbers")
    sources = [WeightedSource(count_up(folder, number, size), 1.0) for number, size in enumerate(sizes)]
    parts = {name: PARTS[name] for name in order}
    asked = {"samples": samples, "heldout": share, "reserve": 3 if samples else 0}
    try:
        made = read(sources, parts=parts, **asked)
    except CompressionError as error:
        if not re.search("too short to hold a part of it out|at least [12] are needed", str(error)):
            raise
        return
    held = {token for batch in heldout_batches(made) for token in batch.flatten().tolist()}
    kept = {token for batch in reserved_batches(made) for token in batch.flatten().tolist()}
    fitted = {token for place in made.fit.fit for token in made.fit.batches[place].flatten().tolist()}
    assert held and len(held) == sum(batch.numel() for batch in heldout_batches(made)) and not held & (kept | fitted)
    for name in parts:
        trained = [token for batch in made.parts[name] for token in batch.flatten().tolist()]
        assert trained and len(set(trained)) == len(trained) and not set(trained) & (held | kept)
    if samples:
        entries = {"length": 8, "seed": 3, "vocab": VOCAB, **asked}
        plain = calibrate(sources, Numbers(), **entries)
        assert plain.heldout == made.fit.heldout
        assert all(torch.equal(one, two) for one, two in zip(plain.batches, made.fit.batches, strict=True))
    again = repeat_text(json.loads(json.dumps(made.identity)), Numbers(), VOCAB)
    assert again.identity == made.identity
    assert all(torch.equal(*pair) for pair in zip(heldout_batches(made), heldout_batches(again), strict=True))


def test_short_text_starts_again_by_hand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """4 sequences of 8, one of them held out; 20 tokens behind them, where 2 x 6 and 5 x 4 are asked for."""
    source = WeightedSource(count_up(tmp_path, 0, 52), 1.0)
    stream = stream_of(source.source)
    parts = {"a": TextPart(2, 6), "b": TextPart(5, 4)}
    made = read([source], samples=4, reserve=0, parts=parts)
    assert flat(made.fit.batches, 0) == stream[:32] and flat(made.fit.heldout_batches, 0) == stream[24:32]
    behind = stream[40:52]  # a fifth of the 44 tokens that are not held out: 1.4, so one sequence of 6
    assert flat(heldout_batches(made), 0) == stream[24:32] + behind[-6:]
    assert flat(made.parts["a"], 0) == stream[32:44]
    assert flat(made.parts["b"], 0) == stream[44:46] + stream[:18]
    assert "s0.txt is short: behind its first sequences are 14 of 32 tokens asked for" in caplog.text
    all_of_it = read([source], samples=4, reserve=0, parts={"a": TextPart(99, 6)})
    assert len(flat(all_of_it.parts["a"], 0)) == 6 * ((24 + 14) // 6)  # once round, and no further


def test_text_for_one_part_alone(tmp_path: Path) -> None:
    source = WeightedSource(count_up(tmp_path, 0, 900), 1.0)
    emphasis = Emphasis({"end": MarkedTokens(8.0, ((7,), (8, 9)))})
    made = read([source], samples=0, reserve=0, heldout=0.0, parts={"a": TextPart(50, 6)}, emphasis=emphasis)
    stream = stream_of(source.source)
    assert made.fit.batches == () and made.fit.tokens == 0
    assert flat(made.parts["a"], 0) == stream[:300] and flat(heldout_batches(made), 0) == stream[300 : 300 + 48 * 6]
    entry = made.identity["sources"][0]
    assert (entry["samples"], entry["tokens"], entry["heldout_samples"]) == (98, 588, 48)
    assert made.identity["parts"]["a"]["samples"] == 50 and made.identity["heldout_text"]["samples"] == 48
    again = repeat_text(json.loads(json.dumps(made.identity)), Numbers(), VOCAB)
    assert again.identity == made.identity and again.emphasis == emphasis
    tiny = read(
        [WeightedSource(count_up(tmp_path, 1, 12), 1.0)], samples=0, reserve=0, parts={"a": TextPart(50, 20, minimum=0)}
    )
    assert [batch.shape for batch in (*tiny.parts["a"], *heldout_batches(tiny))] == [(1, 9), (1, 3)]


def test_each_document_is_tokenised_once(tmp_path: Path) -> None:
    texts = list[str]()

    class Counting(Numbers):
        def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
            texts.append(text)
            return super().__call__(text, **options)

    sources = [WeightedSource(count_up(tmp_path, number, 600), 1.0) for number in range(2)]
    made = read_text(spec(sources), Counting(), VOCAB)
    used = made.identity["tokens"] + sum(batch.numel() for batch in reserved_batches(made))
    read_documents = [text for text in texts if " " in text]  # a text alone shows what opens texts
    assert len(read_documents) == len(set(read_documents))
    assert used <= 3 * len(read_documents) < used + 6  # documents of three tokens


def test_text_to_evaluate_on_lies_behind_all_else_and_changes_none_of_it(tmp_path: Path) -> None:
    sources = [WeightedSource(count_up(tmp_path, number, 2000), 1.0) for number in (1, 2)]
    without, made = read(sources), read(sources, evaluation=10)
    assert made.identity == without.identity and made.fit.identity == without.fit.identity and not without.evaluation
    assert repeat_text(made.identity, Numbers(), VOCAB, evaluation=10).identity == made.identity
    for number, own in zip((1, 2), made.evaluation, strict=True):
        parts = [batch for name in made.parts for batch in made.parts[name]]
        used = flat([*made.fit.batches, *reserved_batches(made), *heldout_batches(made), *parts], number)
        stream = stream_of(str(tmp_path / f"s{number}.txt"))
        behind = stream[len(set(used)) :]  # as nothing is read twice
        assert set(used).isdisjoint(behind) and flat(own.batches, number) == behind[: 5 * 4] and not made.short


def test_short_text_is_evaluated_on_what_is_held_out_of_it(tmp_path: Path) -> None:
    for tokens, left in ((12 * 8 + 20, 2), (60, 0)):
        made = read([WeightedSource(count_up(tmp_path, 1, tokens), 1.0)], reserve=0, parts={}, evaluation=10)
        (own,) = made.evaluation
        kept = flat(heldout_batches(made), 1)
        assert len(kept) >= 8 and made.short == (own.name,)
        assert flat(own.batches, 1)[left * 8 :] == kept and len(flat(own.batches, 1)) == left * 8 + len(kept)
        assert repeat_text(made.identity, Numbers(), VOCAB).identity == made.identity
    whole = {"reserve": 0, "parts": {}, "heldout": 0.0, "evaluation": 10}
    assert read([WeightedSource(count_up(tmp_path, 1, 60), 1.0)], **whole).evaluation == ()  # nothing is held out of it


def test_changed_text_and_edited_parts_are_refused(tmp_path: Path) -> None:
    made = read([WeightedSource(count_up(tmp_path, 0, 900), 1.0)])
    for change, message in (
        (lambda c: c["asked"]["parts"]["distill"].update(sequences=30), "s0.txt no longer gives the tokens"),
        (lambda c: c["asked"]["parts"]["distill"].pop("length"), "cannot be repeated .*parts.distill.length"),
        (lambda c: c["asked"].update(parts=[]), "cannot be repeated .*parts"),
        (lambda c: c["parts"]["routers"].update(sha256="0"), "calibration has 'parts' that do not"),
        (lambda c: c["heldout_text"].update(samples=9), "calibration has 'heldout_text' that do not"),
    ):
        stored = json.loads(json.dumps(made.identity))
        change(stored)
        with pytest.raises(CompressionError, match=message):
            repeat_text(stored, Numbers(), VOCAB)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"samples": 0, "reserve": 0, "parts": {}}, "--samples 0 and --sequence-length 8 leave nothing"),
        ({"samples": 1}, "1 samples and 3 reserved sequences are too few for 2 calibration sources; give one of each"),
        ({"reserve": 1}, "1 reserved sequences are too few for 2 calibration sources; give one of each"),
    ],
)
def test_impossible_specs_are_refused_before_anything_is_read(more: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        spec(**{"sources": [WeightedSource("gone.txt", 1.0), WeightedSource("lost.txt", 1.0)], **more})


def test_too_little_text_for_a_step_is_refused(tmp_path: Path) -> None:
    source = WeightedSource(count_up(tmp_path, 0, 60), 1.0)
    with pytest.raises(CompressionError, match="gives 8 sequences of 6 tokens to train on for a, and at least 16"):
        read([source], samples=0, reserve=0, parts={"a": TextPart(99, 6, minimum=16)})
    with pytest.raises(CompressionError, match=r"too short to hold a part of it out; .* or lower --samples"):
        read([WeightedSource(count_up(tmp_path, 1, 58), 1.0)], samples=99, reserve=0, heldout=0.0)


def opened_tokenizer() -> Any:
    """One token a byte; a text begins with <s>, as Llama's and Gemma's tokenizers make it."""
    made = small.tokenizer(small.CHAT)
    made._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def test_every_sequence_begins_as_the_tokenizer_begins_texts(tmp_path: Path) -> None:
    texts = [letter * (7 + 5 * number) for number, letter in enumerate("abcdefghijklmnopqrst")]
    path = write(tmp_path, "\n\n".join(texts))
    parts = {"distill": TextPart(3, 12), "routers": TextPart(2, 20)}
    text_spec = TextSpec((WeightedSource(str(path), 1.0),), 6, 16, heldout=0.2, reserve=2, parts=parts)
    tokenizer = opened_tokenizer()
    made = read_text(text_spec, tokenizer, small.VOCABULARY)
    batches = [*made.fit.batches, *made.parts["distill"], *made.parts["routers"]]
    batches += [batch for each in (*made.fit.reserved, *made.heldout) for batch in each.batches]
    rows = [row.tolist() for batch in batches for row in batch]
    known = {tuple(tokenizer(f"{text}\n")["input_ids"]) for text in texts}
    assert len(rows) > 13
    for row in rows:
        assert row[0] == 1 and (1, 1) not in pairwise(row)
        first, *others = [list(part) for is_opening, part in groupby(row, lambda token: token == 1) if not is_opening]
        whole = [(1, *part[:-1]) for part in others[:-1]]  # less the token that ends it
        assert set(whole) <= known and len({*first[:-2]}) <= 1
    assert read_text(text_spec, tokenizer, small.VOCABULARY).identity == made.identity


def test_a_chat_is_opened_by_its_template_alone(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": letter * 30}]} for letter in "abcdef"]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)), "chats.jsonl")
    tokenizer = opened_tokenizer()
    plain = run(path, tokenizer, samples=6, length=16)
    assert 1 not in torch.cat([batch.flatten() for batch in plain.batches])
    tokenizer.chat_template = "{{ bos_token }}" + small.CHAT
    for row in torch.cat(run(path, tokenizer, samples=6, length=16).batches).tolist():
        assert row[0] == 1 and row[1] != 1
