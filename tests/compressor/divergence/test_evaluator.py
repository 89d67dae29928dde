import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from compressor.checkpoint.source import locate
from compressor.data.batches import EvaluationSet
from compressor.divergence import evaluator as evaluating
from compressor.divergence.evaluator import Difference, Evaluator, Figures, accepts, require_enough
from compressor.divergence.teacher_outputs import read_base
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import Pass
from compressor.model.substitution import Substitution
from compressor.progress import Silent
from tests.compressor.model.test_streaming import loaded
from tests.support import zoo
from tests.support.audit import paths_of
from tests.support.sequential_runs import drops, merges, opened_wide, run, whole_plan, with_heldout
from tests.support.surgery_reference import cut

# scaled logits, soft caps, tied embeddings, several streams before the head
NAMES = [
    "mixtral", "mixtral-tied", "granitemoe", "gemma4", "cohere2_moe", "minimax_m3_vl", "deepseek_v4", "zaya",
    "inkling", "muse_spark",
]  # fmt: skip


def sets(stock: Any) -> list[EvaluationSet]:
    first, second = zoo.tokens(stock, 5, 12, seed=8), zoo.tokens(stock, 2, 7, seed=9)
    return [EvaluationSet("first", (first[:3], first[3:])), EvaluationSet("second", (second,))]


@torch.no_grad()
def plain(base: Any, model: Any, entries: list[EvaluationSet]) -> list[list[float]]:
    """KL, loss and flips of every sequence, one at a time, from both models' own logits."""
    found: list[list[float]] = [[], [], []]
    for ids in (row[None] for entry in entries for batch in entry.batches for row in batch):
        theirs, ours = (each(input_ids=ids, use_cache=False).logits[0, :-1].double() for each in (base, model))
        apart = kl_div(log_softmax(ours, -1), log_softmax(theirs, -1), reduction="none", log_target=True)
        found[0].append(float(apart.sum(-1).mean()))
        found[1].append(float(cross_entropy(ours, ids[0, 1:])))
        found[2].append(float((theirs.argmax(-1) != ours.argmax(-1)).double().mean()))
    return found


def check(figures: Figures, expected: list[list[float]]) -> None:
    kl, loss, flips = expected
    assert figures.kl.tolist() == pytest.approx(kl, rel=1e-3, abs=1e-5)
    assert figures.loss.tolist() == pytest.approx(loss, rel=1e-5)
    assert figures.flips.tolist() == pytest.approx(flips, abs=1e-9)


@pytest.mark.parametrize("name", zoo.sweep(NAMES))
def test_streamed_models_have_the_figures_of_whole_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = opened_wide(name, tmp_path)
    entries = sets(stock)
    monkeypatch.setattr(evaluating, "LOGITS", 2 * 12 * model.vocabulary)  # at most two sequences at once
    evaluator = Evaluator(model, entries)
    assert max(map(len, evaluator.batches)) <= 3 and evaluator.sequences == 7
    head = model.partial.model.get_output_embeddings()
    hooks = len(head._forward_hooks)
    (base,) = evaluator.measure(model)
    check(base, plain(stock, stock, entries))
    assert not base.kl.any() and not base.flips.any() and not evaluator.missing()
    for make in (drops, merges):
        plans = make(model.architecture)
        small = cut(stock, zoo.family(name).count_field, whole_plan(model, plans).to_dict())
        with evaluator.measuring(model.partial.model) as probe:
            run(model, plans, with_heldout(stock) if make is drops else None, probe=probe)
        check(probe.figures[0], plain(stock, small, entries))
        check(evaluator.measure_loaded(small), plain(stock, small, entries))
        means = probe.figures[0].means
        assert [probe.figures[0].of({domain}).sequences for domain in (0, 1)] == [5, 2]
        weighted = np.average(probe.figures[0].kl, weights=[11] * 5 + [6] * 2)
        assert means["kl"] == pytest.approx(weighted) and means["kl"] > 1e-3
    assert len(head._forward_hooks) == hooks


@pytest.mark.parametrize("name", zoo.sweep(NAMES))
@torch.no_grad()
def test_counted_tokens_and_marks_have_the_figures_of_whole_models(name: str, tmp_path: Path) -> None:
    base_stock, stock = zoo.save(name, tmp_path / "base"), zoo.save(name, tmp_path / "other", seed=1)
    base, other = (open_model(locate(str(tmp_path / part)), "float32", "cpu") for part in ("base", "other"))
    stop_tokens, spans = ((2, 5), (3,)), ((4, 11), (2, 3), (6, 9))  # of the tokens that count, by sequence
    rows = [zoo.tokens(stock, 1, end, seed=end)[0] for _, end in spans]
    rows[0][[5, 9]], rows[0][7] = torch.tensor([2, 5]), 3
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    places = torch.arange(11)
    mask = torch.stack([(places >= begin) & (places < end) for begin, end in spans])
    answers, whole = EvaluationSet("answers", (padded,), (mask,)), EvaluationSet("whole", (zoo.tokens(stock, 2, 8),))
    found = Evaluator(base, [answers, whole], stop_tokens).measure(other)[0]
    assert found.tokens.tolist() == [7, 1, 3, 7, 7] and found.domain.tolist() == [0, 0, 0, 1, 1]
    check(found.of({1}), plain(base_stock, stock, [whole]))
    for number, (row, (begin, _)) in enumerate(zip(rows, spans, strict=True)):
        theirs, ours = (each(input_ids=row[None], use_cache=False).logits[0].double() for each in (base_stock, stock))
        p, q = (logits[begin - 1 : -1].softmax(-1) for logits in (theirs, ours))
        targets = row[begin:]
        assert float(found.kl[number]) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-3, abs=1e-6)
        for loss, each in ((found.base_loss, p), (found.loss, q)):
            assert float(loss[number]) == pytest.approx(float(-each.gather(1, targets[:, None]).log().mean()), rel=1e-5)
        assert float(found.flips[number]) == pytest.approx(float((p.argmax(-1) != q.argmax(-1)).double().mean()))
        for place, tokens in enumerate(stop_tokens):
            due = torch.tensor([float(target in tokens) for target in targets.tolist()], dtype=torch.float64)
            here, there = ([float(each[:, tokens].sum(1) @ at) for each in (p, q)] for at in (due, 1 - due))
            expected = [float(due.sum()), *here, *there]
            assert found.stop_tokens[number, place].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-7)
    alone = Evaluator(base, [answers], stop_tokens).measure_loaded(stock)
    assert (
        torch.allclose(alone.stop_tokens, found.of({0}).stop_tokens, rtol=1e-4)
        and float(alone.stop_tokens[0, 0, 0]) >= 2
    )


def scaled(model: OpenModel, count: int) -> list[Substitution]:
    """Variants of which number n multiplies the first decoder layer's down projections by 1 + n / 10."""
    first = model.architecture.decoder_layers[0]
    keys = [key for key in model.partial.keys_under(first) if key.endswith("experts.down_proj")]

    def tensors(decoder_layer: str, scale: float) -> dict[str, torch.Tensor] | None:
        if decoder_layer != first:
            return None
        return {key: model.partial.model.get_parameter(key) * scale for key in keys}

    return [Substitution(partial(tensors, scale=1 + number / 10)) for number in range(count)]


def test_the_base_runs_along_and_variants_in_one_pass_are_measured_as_each_alone(tmp_path: Path) -> None:
    stock, model = opened_wide("mixtral", tmp_path)
    entries = sets(stock)
    evaluator, kept = Evaluator(model, entries), Evaluator(model, entries)
    few = evaluator.measure(model, scaled(model, 2), only=[[1, 2], [2, 1]])  # the base's answers on these alone
    assert [*evaluator.inputs] == [1, 2]
    together = evaluator.measure(model, scaled(model, 3))
    assert not together[0].kl.any() and not together[0].flips.any() and together[1].kl.all()
    assert [each.kl.tolist() for each in few] == [each.kl[3:].tolist() for each in together[:2]]
    with kept.keeping(first=1) as probe:  # in a pass that somebody else makes
        Pass(model, [zoo.tokens(stock, 2, 9), *probe.batches], to_end=True).run(probe)
    assert all(torch.equal(value, evaluator.inputs[number]) for number, value in kept.inputs.items())
    assert [each.kl.tolist() for each in kept.measure(model, scaled(model, 3))] == [e.kl.tolist() for e in together]
    assert loaded(model.partial) == set()


def test_a_variant_with_another_head_is_compared_with_the_bases_own(tmp_path: Path) -> None:
    base_stock, stock = zoo.save("mixtral", tmp_path / "base"), zoo.save("mixtral", tmp_path / "other", seed=1)
    base, other = (open_model(locate(str(tmp_path / part)), "float32", "cpu") for part in ("base", "other"))
    entries = sets(stock)
    evaluator = Evaluator(base, entries)
    expected = plain(base_stock, stock, entries)
    check(evaluator.measure(other)[0], expected)
    check(evaluator.measure_loaded(stock), expected)
    assert loaded(base.partial) == loaded(other.partial) == set()


def test_what_is_kept_on_disk_is_found_again_and_only_what_is_missing_is_asked(tmp_path: Path) -> None:
    stock, model = opened_wide("mixtral", tmp_path / "model")
    entries, texts = sets(stock), {"one": [zoo.tokens(stock, 2, 9)], "two": [zoo.tokens(stock, 1, 8, seed=2)]}
    first, second = Evaluator(model, entries), Evaluator(model, entries)
    written = list[int]()

    def read(texts: dict[str, list[Tensor]], evaluator: Evaluator | None, *hidden: str) -> Any:
        with paths_of("os.rename", "/kept/") as kept:
            answers = read_base(model, texts, evaluator, Silent(), tmp_path / "kept", hidden=hidden)
        written.append(len(kept))
        return answers

    answers = read(texts, first, "two")
    assert written == [5] and answers["one"][0].hidden is None and answers["two"][0].hidden is not None
    again = read(texts, second, "two")
    assert written == [5, 0]
    for name, own in answers.items():
        assert all(torch.equal(a.logs, b.logs) for a, b in zip(own, again[name], strict=True))
    assert all(torch.equal(value, second.inputs[number]) for number, value in first.inputs.items())
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) == 5
    files[0].write_bytes(files[0].read_bytes()[:-1])  # a power loss
    read(texts, Evaluator(model, entries), "two")
    read(texts, Evaluator(model, entries), "one", "two")
    read({"one": texts["two"]}, None)  # another text of that name
    assert written == [5, 0, 1, 1, 1]


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    _, headless = opened_wide("openai_privacy_filter", tmp_path / "headless")
    with pytest.raises(CompressionError, match="TokenClassification has no language-model head"):
        Evaluator(headless, [])
    _, model = opened_wide("mixtral", tmp_path / "model")
    with pytest.raises(CompressionError, match="Linear has no"), Evaluator(model, []).measuring(torch.nn.Linear(2, 2)):
        pass


def figures(kl: list[float]) -> Figures:
    zeros = torch.zeros(len(kl), dtype=torch.float64)
    return Figures(torch.tensor(kl, dtype=torch.float64), zeros, zeros, zeros.long() + 9, zeros.long())


KL = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=2, max_size=40)


@given(KL)
def test_a_change_is_accepted_by_its_gain_and_error_on_eight_sequences(pairs: list[tuple[float, float]]) -> None:
    before, after = (list(values) for values in zip(*pairs, strict=True))
    gains = np.array(before) - np.array(after)
    error = gains.std(ddof=1) / math.sqrt(len(gains))
    found = Difference.of(before, after)
    assert found.gain == pytest.approx(gains.mean(), abs=1e-12)
    assert found.standard_error == pytest.approx(error, abs=1e-12) and found.sequences == len(gains)
    if abs(gains.mean() - error) > 1e-9:
        assert accepts(figures(before), figures(after)) is bool(len(gains) >= 8 and gains.mean() > error)
    assert not accepts(figures(before), figures(before))
    assert not (accepts(figures(before), figures(after)) and accepts(figures(after), figures(before)))


@given(st.lists(st.floats(0, 100), max_size=7), st.floats(0, 100))
def test_fewer_than_eight_sequences_accept_nothing(kl: list[float], gain: float) -> None:
    assert not accepts(figures([value + gain for value in kl]), figures(kl))
    with pytest.raises(CompressionError, match=r"8 held-out sequences .* leaves [0-7]; give more text"):
        require_enough(len(kl), "a step")
    require_enough(8, "a step")


@pytest.mark.parametrize(
    ("before", "after", "accepted"),
    [
        ([math.nan] * 8, [0.1] * 8, True),
        ([0.1] * 8, [math.nan] * 8, False),
        ([math.nan] * 8, [math.nan] * 8, False),
        ([math.inf] * 8, [0.1] * 8, True),
        ([math.nan] * 7, [0.1] * 7, False),
    ],
)
def test_a_divergence_that_is_no_number_is_as_far_as_can_be(
    before: list[float], after: list[float], accepted: bool
) -> None:
    assert accepts(figures(before), figures(after)) is accepted
