"""The judge's losses and divergences against cross-entropy and KL of whole stock models' logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from compressor.data.batches import EvaluationSet
from compressor.errors import CompressionError
from compressor.evaluation import heldout as judging
from compressor.evaluation.heldout import Judge, Judgement, evaluation_batches
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerStream
from tests import zoo
from tests.ordered import drops, merges, opened_wide, run, whole_plan, with_heldout
from tests.reference import cut

# scaled logits, soft caps, tied embeddings, several streams before the head
NAMES = [
    "mixtral", "mixtral-tied", "granitemoe", "gemma4", "cohere2_moe", "minimax_m3_vl", "deepseek_v4", "zaya",
    "inkling", "muse_spark",
]  # fmt: skip


def sets(stock: Any) -> list[EvaluationSet]:
    """Two sets, of several batches and of sequences of another length."""
    first, second = zoo.tokens(stock, 5, 12, seed=8), zoo.tokens(stock, 2, 7, seed=9)
    return [EvaluationSet("first", (first[:3], first[3:])), EvaluationSet("second", (second,))]


@torch.no_grad()
def plain(stock: Any, model: Any, entry: EvaluationSet) -> Judgement:
    """Sums over a set, from both models' own logits."""
    tokens, loss, kl = 0, 0.0, 0.0
    for ids in entry.batches:
        theirs, ours = (each(input_ids=ids, use_cache=False).logits[:, :-1].double() for each in (stock, model))
        targets = ids[:, 1:].reshape(-1)
        tokens += targets.numel()
        loss += float(cross_entropy(ours.flatten(0, 1), targets, reduction="sum"))
        kl += float(kl_div(log_softmax(ours, -1), log_softmax(theirs, -1), reduction="sum", log_target=True))
    return Judgement(tokens, loss, kl)


def check(found: Judgement, expected: Judgement) -> None:
    assert found.tokens == expected.tokens
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.kl == pytest.approx(expected.kl, rel=1e-3, abs=1e-4)


def judge_original(model: OpenModel, judge: Judge) -> None:
    units, numbers = model.architecture.units, range(len(judge.tokens))
    with judge.watch(model.partial.model):
        LayerStream(model.partial, judge.tokens, units, units, numbers).run(judge)


@pytest.mark.parametrize("name", NAMES)
def test_streamed_models_are_judged_as_whole_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = opened_wide(name, tmp_path)
    entries = sets(stock)
    monkeypatch.setattr(judging, "LOGITS", 2 * 12 * model.vocabulary)  # at most two sequences at once
    judge = Judge(evaluation_batches(entries, model.vocabulary), len(entries))
    assert max(len(ids) for ids in judge.tokens) <= 3
    hooks = len(model.partial.model.get_output_embeddings()._forward_pre_hooks)
    judge_original(model, judge)
    for found, entry in zip(judge.found, entries, strict=True):
        check(found, plain(stock, stock, entry))
        assert found.kl == pytest.approx(0, abs=1e-6)
    for make in (drops, merges):
        plans = make(model.architecture)
        small = cut(stock, zoo.family(name).count_field, whole_plan(model, plans).to_dict())
        with judge.watch(model.partial.model):
            run(model, plans, with_heldout(stock) if make is drops else None, judge=judge)
        for found, entry in zip(judge.found, entries, strict=True):
            check(found, plain(stock, small, entry))
            assert found.kl > 0.01
    assert len(model.partial.model.get_output_embeddings()._forward_pre_hooks) == hooks


def test_a_model_without_a_head_is_refused() -> None:
    judge = Judge([(0, torch.zeros(1, 3, dtype=torch.long))], 1)
    for model, name in (
        (zoo.build("openai_privacy_filter"), "OpenAIPrivacyFilterForTokenClassification"),
        (torch.nn.Linear(2, 2), "Linear"),
    ):
        with pytest.raises(CompressionError, match=f"{name} has no language-model head"), judge.watch(model):
            pass


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(2, 20)), max_size=3), max_size=3), st.integers(1, 3000)
)
def test_batches_are_the_sets_in_order_and_small_enough(shapes: list[list[tuple[int, int]]], limit: int) -> None:
    counter = torch.arange(10_000)
    entries, begin = [], 0
    for number, batches in enumerate(shapes):
        made = []
        for rows, length in batches:
            made.append(counter[begin : begin + rows * length].view(rows, length))
            begin += rows * length
        entries.append(EvaluationSet(str(number), tuple(made)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "LOGITS", limit)
        found = evaluation_batches(entries, vocabulary=11)
    seen: list[Tensor] = [ids.flatten() for _, ids in found]
    assert torch.equal(torch.cat([*seen, counter[:0]]), counter[:begin])
    for _, ids in found:
        assert len(ids) == 1 or ids.numel() * 11 <= limit
    for number, entry in enumerate(entries):
        tokens = sum(ids.numel() for owner, ids in found if owner == number)
        assert tokens == sum(ids.numel() for ids in entry.batches)
