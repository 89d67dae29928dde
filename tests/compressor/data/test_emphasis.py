"""Emphasis: which positions count more, as a naive loop finds them, and everything fitted repeats them so often."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import compressor
from compressor.data.emphasis import PLAIN, Emphasis, MarkedTokens
from compressor.divergence.teacher_outputs import Distributions, read_base
from compressor.model.tokenizer import thinking_end
from compressor.progress import Silent
from compressor.recipe.recipe import read_recipe
from compressor.recipe.step import TextOptions
from compressor.steps.distill.objective import Batch, Objective
from compressor.steps.distill.options import Distill
from compressor.steps.routers.weights import _moments
from tests.support import small
from tests.support.command_line import Run, refused
from tests.support.cut_layers import cut_case
from tests.support.training_setups import lesson

pytestmark = pytest.mark.usefixtures("offline")
THINKS = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{{ eos_token }}\n{% endfor %}"


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_positions_before_a_marked_run_count_more(ids: list[int], run_of_ids: list[int]) -> None:
    emphasis = Emphasis({"think_end": MarkedTokens(5.0, (tuple(run_of_ids),))})
    expected = [1.0] * len(ids)
    for begin in range(len(ids) - len(run_of_ids) + 1):
        if ids[begin : begin + len(run_of_ids)] == run_of_ids:
            for place in range(begin, begin + len(run_of_ids)):
                if place:
                    expected[place - 1] = 5.0
    assert emphasis.weights(torch.tensor([ids, ids])).tolist() == [expected, expected]


def test_recorded_tokens_count_as_often_as_they_are_emphasised() -> None:
    found, plain = cut_case("mixtral", heaviest=4), cut_case("mixtral")
    counts = (found.recording.weights / plain.recording.weights).round().long()
    torch.testing.assert_close(found.recording.weights, counts * plain.recording.weights)
    assert set(counts.tolist()) == {1, 2, 3, 4}
    rows = found.fit[:50]
    assert found.cut.error(rows) == pytest.approx(plain.cut.error(rows.repeat_interleave(counts[rows])), rel=1e-5)


def test_a_distillation_has_the_gradient_of_the_weighted_sum(tmp_path: Path) -> None:
    model = lesson("mixtral", tmp_path).model
    generator, (rows, length, words) = torch.Generator().manual_seed(0), (3, 5, 11)
    tokens = torch.randint(words, (rows, length), generator=generator)
    base, logits = (torch.randn(rows, length, words, generator=generator) for _ in range(2))
    states, hidden = (torch.randn(rows, length, 4, generator=generator) for _ in range(2))
    weights = torch.randint(1, 9, (rows, length), generator=generator).float()
    logs = base.log_softmax(-1)
    every = torch.arange(words).expand(rows, length, words)
    kept = Distributions(every, logs, torch.full((rows, length), -60.0), states)
    options = Distill(kl=0.7, cross_entropy=0.4, hidden_states=0.3)
    objective = Objective(options, [Batch(tokens, kept, weights)], model)
    logits.requires_grad_()
    loss = objective.loss(0, type("Output", (), {"logits": logits}))
    ours = logits.log_softmax(-1)
    kl = torch.tensor(0.0)
    entropy, predicted, whole = torch.tensor(0.0), 0.0, float(weights.sum())
    for row in range(rows):
        for place in range(length):
            kl = kl + weights[row, place] * (logs[row, place].exp() * (logs - ours)[row, place]).sum()
            if place + 1 < length:
                entropy = entropy - weights[row, place] * ours[row, place, tokens[row, place + 1]]
                predicted += float(weights[row, place])
    expected = 0.7 * kl / whole + 0.4 * entropy / predicted
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    gradient, wanted = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (loss, expected))
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    often = [(row, place) for row in range(rows) for place in range(length) for _ in range(int(weights[row, place]))]
    far = 0.0
    for row in range(rows):
        own = [place for at, place in often if at == row]
        far += len(own) * float((hidden - states)[row, own].square().sum() / states[row, own].square().sum())
    assert objective.last is not None
    objective.wrap_forward(objective.last, lambda value: value)(hidden)
    assert objective.parts["hidden_states"] == pytest.approx(far / len(often), rel=1e-5)


def test_routers_get_the_gradient_of_tokens_that_count_so_often(tmp_path: Path) -> None:
    found = lesson("mixtral", tmp_path)
    keys = [f"{layer.router}.weight" for layer in found.model.architecture.layers]
    own = {key: found.stock.state_dict()[key] for key in keys}
    tokens = found.tokens[0]
    answers = read_base(found.base, {"text": [tokens]}, None, Silent(), tmp_path / "kept")["text"]
    last = keys[-1]

    def both(*weights: float) -> list[torch.Tensor]:
        each = [Emphasis({"end": MarkedTokens(weight, ((int(tokens[0, 4]),),))}) for weight in weights]
        return [_moments(found.model, own, [(tokens, answers[0])], emphasis)[last].both for emphasis in each]

    one, three, five = both(1.0, 3.0, 5.0)  # X'G is linear in the weights
    torch.testing.assert_close(three, (one + five) / 2, rtol=1e-4, atol=1e-4 * float(three.abs().max()))
    assert not torch.allclose(three, one)
    (plain,) = (_moments(found.model, own, [(tokens, answers[0])], PLAIN)[last].both,)
    torch.testing.assert_close(one, plain)


@pytest.mark.full
def test_emphasis_by_flag_yaml_and_python_leaves_the_same_bytes(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a plan names the text without its folder
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    flags = ["--experts", 4, "--calibration", text, "--samples", 8, "--sequence-length", 32, "--correct", "ridge"]
    for name, more in {"a": ["--set", "calibration.emphasis.end=8"], "b": ["--emphasis", "end=8"], "plain": []}.items():
        assert run("compress", model, "-o", tmp_path / name, *flags, *more).status == 0
    written = read_recipe(tmp_path / "a" / "recipe.yaml")
    assert written.calibration.emphasis is not None and written.calibration.emphasis.end == 8
    assert run("compress", tmp_path / "a" / "recipe.yaml", "-o", tmp_path / "c").status == 0
    options = TextOptions.model_validate(
        {"data": str(text), "samples": 8, "sequence_length": 32, "emphasis": {"end": 8}}
    )
    compressor.compress(str(model), tmp_path / "d", experts=4, correct="ridge", calibration=options)
    record = json.loads((tmp_path / "a" / "compression.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(record["plan"]))
    assert run("apply", tmp_path / "plan.json", "-o", tmp_path / "e", "--model", model).status == 0
    a, *alike, plain = (
        {key: value.tolist() for key, value in load_file(tmp_path / name / "model.safetensors").items()}
        for name in ("a", "b", "c", "d", "e", "plain")
    )
    assert all(a == other for other in alike) and a != plain
    assert "emphasis" not in (tmp_path / "plain" / "recipe.yaml").read_text()


def test_tokens_that_a_model_lacks_are_refused_by_name(tmp_path: Path, run: Run) -> None:
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    flags = ["compress", model, "-o", tmp_path / "out", "--experts", 4, "--calibration", text]
    refused(
        run(*flags, "--set", "calibration.emphasis.think_end=8"), "emphasis.think_end: .* no token that ends thinking"
    )
    refused(run(*flags, "--set", "calibration.emphasis.start=8"), "emphasis.start is not known")
    refused(run(*flags, "--emphasis", "end=0"), "emphasis.end should be .*, it is '0'")
    refused(run(*flags, "--emphasis", "end"), "emphasis.end should be .*, it is ''")
    small.edit_json(model / "tokenizer_config.json", lambda content: content.update(eos_token=None))
    for name in ("config.json", "generation_config.json"):
        small.edit_json(model / name, lambda content: content.update(eos_token_id=None))
    refused(run(*flags, "--emphasis", "end=8"), "emphasis.end: .* has no end token")


def test_a_template_shows_what_ends_thinking() -> None:
    assert thinking_end(small.tokenizer()) is None
    assert thinking_end(small.tokenizer(THINKS)) == "</think>"
    assert thinking_end(small.tokenizer("{{ '[THINK]' + x + '[/THINK]' }}")) == "[/THINK]"
    assert thinking_end(small.tokenizer("<seed:think>{{ x }}</seed:think>")) == "</seed:think>"
