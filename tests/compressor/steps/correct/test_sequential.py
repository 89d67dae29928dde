"""A pass in order against whole stock models, an interrupted one, and what becomes of corrections that do harm."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

import compressor
from compressor.data.batches import repeat_text
from compressor.divergence.evaluator import Difference, Evaluator
from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Silent
from compressor.recipe.plan import ExpertPlan, LayerPlan
from compressor.recipe.registry import load_strategy
from compressor.steps.correct.options import Correct
from compressor.steps.correct.sequential import correct, read_difference
from compressor.steps.cutting import CutFiles, Tensors, cut_layers
from compressor.steps.job import make_job
from compressor.steps.prune.planning import Planner, PruneSpec
from tests.support import small, zoo
from tests.support.audit import Moment, happening, paths_of, press_ctrl_c
from tests.support.opened_models import one_expert, plain_calls
from tests.support.sequential_runs import (
    SHARED,
    Watched,
    drops,
    keeps,
    merges,
    opened_wide,
    run,
    whole_plan,
    with_heldout,
)
from tests.support.surgery_reference import cut, realign

LOGITS = 1e-5
TUNE = Correct("tune", steps=3, tokens=20)


def watched_run(
    model: OpenModel, plans: dict[str, LayerPlan], ids: Tensor, **more: Any
) -> tuple[dict[int, Tensor], dict[str, LayerPlan]]:
    """Logits of batches of two and one sequences from a pass in order, and the plans that come back."""
    watched = Watched([ids[:2], ids[2:]])
    made = run(model, plans, probe=watched, **more)
    return watched.logits, made


@torch.no_grad()
def whole(model: PreTrainedModel, ids: Tensor) -> dict[int, Tensor]:
    """Logits of the same batches from a plain forward."""
    return {number: model(input_ids=part, use_cache=False).logits for number, part in enumerate((ids[:2], ids[2:]))}


def check(found: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for number, logits in expected.items():
        torch.testing.assert_close(found[number], logits, rtol=0, atol=LOGITS)


def check_figures(figures: dict[str, Any], module: str) -> None:
    """The error is the least of those tried, under the name of what is kept."""
    if "heldout_error" not in figures:
        assert "vision" in module and "reason" in figures  # no text reaches them
        return
    tried = [value for key, value in figures.items() if key.startswith("heldout_error_")]
    assert figures["heldout_error"] == min(tried) <= figures["heldout_error_before"]
    assert figures["heldout_error"] == figures[f"heldout_error_{figures['kept'].replace('none', 'before')}"]


@pytest.mark.parametrize("name", zoo.sweep(but={*SHARED, *zoo.LOOPED}))
def test_every_family_puts_out_what_its_cut_and_corrected_stock_model_does(name: str, tmp_path: Path) -> None:
    stock, model = opened_wide(name, tmp_path / "in")
    data, plans, ids = with_heldout(stock), drops(model.architecture), zoo.tokens(stock, 3, seed=5)
    expected = cut(stock, zoo.family(name).count_field, whole_plan(model, plans).to_dict())
    more: dict[str, Any] = {"data": data, "correction": TUNE, "files": CutFiles(tmp_path / "cut")}
    has_head = model.partial.model.get_output_embeddings() is not None
    if has_head:
        found, made = watched_run(model, plans, ids, **more)
    else:
        with pytest.raises(CompressionError, match="has no language-model head"):
            Evaluator.of(model, [ids])
        made = run(model, plans, **more)
    assert list(made) == list(plans)
    state = expected.state_dict()
    for layer in model.architecture.layers:
        figures = made[layer.name].figures["correction"]
        check_figures(figures, layer.name)
        corrected = more["files"].tensors(layer)
        assert corrected.keys() == {*(tensor.key for tensor in layer.tensors), *layer.tables}
        unlike = [key for key, value in corrected.items() if not torch.equal(value, state[key])]
        assert bool(unlike) == (figures["kept"] != "none")
        expected.load_state_dict(corrected, strict=False)
    if has_head:
        check(found, whole(expected, ids))


@pytest.mark.parametrize("name", zoo.sweep(zoo.FAMILIES, but={*SHARED, *zoo.LOOPED}))
def test_a_layer_that_keeps_all_experts_misses_nothing(name: str, tmp_path: Path) -> None:
    """The router, called again on what every family's pass recorded, chooses as it did."""
    stock, model = opened_wide(name, tmp_path)
    made = run(model, keeps(model.architecture), with_heldout(stock), measure=True)
    assert list(made) == [layer.name for layer in model.architecture.layers]
    for plan in made.values():
        check_figures(plan.figures["correction"], plan.module)
        assert plan.figures["correction"].get("heldout_error", 0.0) < 1e-9


class Around:
    """The experts' output [T, H] and the decoder layer's output [T, H] in every call of a layer from now on."""

    def __init__(self, model: Any, layer: MoeLayer) -> None:
        self.experts, self.behind = list[Tensor](), list[Tensor]()
        self.called: Any = None
        decoder_layer = model.get_submodule(layer.decoder_layer)
        decoder_layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.get_submodule(layer.name).register_forward_hook(lambda _, __, output: self.experts.append(output))
        decoder_layer.register_forward_hook(self._leave)

    def _enter(self, _: Any, args: Any, kwargs: Any) -> None:
        def copied(value: Any) -> Any:
            return value.clone() if isinstance(value, Tensor) else value

        self.called = [copied(value) for value in args], {key: copied(value) for key, value in kwargs.items()}

    def _leave(self, _: Any, __: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        self.behind.append(hidden.flatten(0, -2))


@torch.no_grad()
def weighted_error(stock: Any, smaller: Any, layer: MoeLayer, ids: Tensor, toward: float) -> float:
    """What a layer of a smaller model misses of the base's on its own inputs, by whole models.

    The target goes `toward` the base's own hidden states; tokens count by the inverse square of the hidden state.
    """
    own = Around(stock, layer)
    stock(input_ids=ids, use_cache=False)
    small_around = Around(smaller, layer)
    smaller(input_ids=ids, use_cache=False)
    args, kwargs = small_around.called
    stock.get_submodule(layer.decoder_layer)(*args, **kwargs)
    factor = getattr(stock.config, "residual_multiplier", 1.0)
    base, hidden = own.experts[-1].flatten(0, -2).double(), own.behind[-1]
    target = base + toward * (own.behind[0] - hidden) / factor
    weights = 1 / hidden.double().square().sum(-1)
    missed = (small_around.experts[-1].flatten(0, -2) - target).square().sum(-1)
    return float((weights * missed).sum() / (weights * target.square().sum(-1)).sum())


@pytest.mark.parametrize(
    ("name", "given", "toward"),
    [
        ("mixtral", None, 0.5),
        ("deepseek_v3", None, 0.5),
        ("gpt_oss", 0.7, 0.7),
        ("granitemoe", 0.7, 0.7),
        ("gemma4", None, 0.0),  # whose outputs pass a norm
    ],
)
def test_errors_are_those_of_whole_models(name: str, given: float | None, toward: float, tmp_path: Path) -> None:
    stock, model = opened_wide(name, tmp_path / "in")
    data, plans, files = with_heldout(stock), drops(model.architecture), CutFiles(tmp_path / "cut")
    how = Correct("ridge") if given is None else Correct("ridge", toward=given)
    made = run(model, plans, data, correction=how, files=files)
    smaller = cut(stock, zoo.family(name).count_field, whole_plan(model, plans).to_dict())
    (heldout,) = data.heldout_batches
    for layer in model.architecture.layers:
        figures = made[layer.name].figures["correction"]
        assert figures.get("toward", 0.0) == toward
        before = weighted_error(stock, smaller, layer, heldout, toward)
        smaller.load_state_dict(files.tensors(layer), strict=False)
        after = weighted_error(stock, smaller, layer, heldout, toward)
        assert figures["heldout_error_before"] == pytest.approx(before, rel=1e-3, abs=2e-6)
        assert figures["heldout_error"] == pytest.approx(after, rel=1e-3, abs=2e-6)


@pytest.mark.parametrize("name", ["gemma4", "hy_v4"])
def test_an_output_that_passes_a_norm_goes_toward_nothing(name: str, tmp_path: Path) -> None:
    stock, model = opened_wide(name, tmp_path)
    plans, data = drops(model.architecture), with_heldout(stock)
    made = run(model, plans, data, correction=Correct("ridge"))
    assert not any("toward" in plan.figures["correction"] for plan in made.values())
    with pytest.raises(CompressionError, match=r"leave out correct\.toward"):
        run(model, plans, data, correction=Correct("ridge", toward=0.5))


@pytest.mark.parametrize(
    "name",
    ["mixtral", "gpt_oss", "deepseek_v4", "zaya"]
    + [zoo.full(name) for name in ("gemma4", "deepseek_v2-group_limited", "granitemoe", "aria")],
)
def test_a_merge_without_calibration_equals_the_merged_stock_model(name: str, tmp_path: Path) -> None:
    stock, model = opened_wide(name, tmp_path)
    plans, ids = merges(model.architecture), zoo.tokens(stock, 3, seed=5)
    expected = cut(stock, zoo.family(name).count_field, whole_plan(model, plans).to_dict())
    found, _ = watched_run(model, plans, ids, data=None)
    check(found, whole(expected, ids))
    assert not any(torch.equal(found[number], logits) for number, logits in whole(stock, ids).items())


@pytest.mark.parametrize("name", sorted(SHARED))
def test_experts_that_two_layers_share_are_refused(name: str, tmp_path: Path) -> None:
    stock, model = opened_wide(name, tmp_path)
    with pytest.raises(CompressionError, match="shares its experts with another layer, so it cannot be compressed in"):
        run(model, keeps(model.architecture), with_heldout(stock))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("name", "method", "dtype"),
    [
        ("mixtral-tied", "none", "float32"),
        zoo.full("zaya", "none", "float32"),
        zoo.full("gpt_oss", "tune", "float32"),
        ("deepseek_v4", "tune", "float32"),
        ("gemma4", "ridge", "float32"),
        ("mixtral", "tune", "bfloat16"),
    ],
)
def test_what_passes_is_what_is_written(name: str, method: str, dtype: str, tmp_path: Path) -> None:
    """The logits of the pass are those of the stock model loaded from the output, corrected or not."""
    stock, model = opened_wide(name, tmp_path / "in", dtype, vocab_size=small.VOCABULARY)
    small.tokenizer().save_pretrained(tmp_path / "in")
    how = Correct(method, steps=3, tokens=20)
    steps = [compressor.Prune(strategy="count-guided", experts=6, correct=how)]
    text: dict[str, Any] = {"calibration": str(small.text_file(tmp_path)), "samples": 12, "sequence_length": 12}
    plan = compressor.compress(str(tmp_path / "in"), tmp_path / "out", steps, device="cpu", **text).plan
    assert plan.calibration is not None
    data = repeat_text(plan.calibration, load_tokenizer(tmp_path / "in"), model.vocabulary).fit
    plans = {layer.module: layer for layer in plan.expert_plan.layers}
    ids = zoo.tokens(stock, 3, seed=5)
    found, _ = watched_run(model, plans, ids, data=data, correction=how)
    written = zoo.reload(name, tmp_path / "out")
    realign(written)
    assert written.dtype == getattr(torch, dtype)
    check(found, whole(written, ids))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", ["granitemoe_swa", "ernie4_5_vl_moe"])  # three layers; two experts modules in a layer
def test_an_interrupted_pass_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    """Text and vision experts of one decoder layer are finished together or not at all."""
    stock, model = opened_wide(name, tmp_path / "in")
    more: dict[str, Any] = {"data": with_heldout(stock), "correction": TUNE}
    whole_files, files, plans = CutFiles(tmp_path / "whole"), CutFiles(tmp_path / "cut"), drops(model.architecture)
    run(model, plans, files=whole_files, **more)
    last = model.architecture.layers[-1]
    moment = Moment(pattern=rf"/cut/{re.escape(last.name)}\.safetensors$")
    with happening(moment, press_ctrl_c), pytest.raises(KeyboardInterrupt):
        run(model, plans, files=files, **more)
    with paths_of("os.rename", r"/cut/.*\.safetensors$") as corrected:
        run(model, plans, files=files, **more)
    again = [layer.name for layer in model.architecture.layers if layer.decoder_layer == last.decoder_layer]
    assert [path.stem for path in corrected] == again
    assert files_of(files.folder) == files_of(whole_files.folder)


def test_planning_in_order_sees_the_compressed_earlier_layers(tmp_path: Path) -> None:
    """The counts that decide the second layer are those of a stock model whose first layer is cut."""
    stock, model = opened_wide("qwen3_moe", tmp_path)
    data, spec = with_heldout(stock), PruneSpec(load_strategy("reap", {}), 6)
    made = Planner(model, data, Silent()).plan_sequentially(spec, None)
    assert {layer.upstream for layer in made.layers} == {"compressed"}
    first, second = model.architecture.layers
    only_first = {first.name: made.layers[0], second.name: LayerPlan.keep(second, range(6))}
    small = cut(stock, "num_experts", whole_plan(model, only_first).to_dict())
    stock.model.layers[0] = small.model.layers[0]
    calls = plain_calls(stock, model.architecture, [data.batches[0], data.batches[2]])[second.name]
    hidden, index, weights = calls.joined()
    scores = torch.zeros(8)
    for expert in range(8):
        rows, places = (index == expert).nonzero(as_tuple=True)
        norms = one_expert(stock.get_submodule(second.name), expert, hidden[rows]).norm(dim=-1)
        scores[expert] = (weights[rows, places] * norms).mean() if len(rows) else 0.0
    kept = sorted(scores.argsort(descending=True)[:6].tolist())
    assert [group.members[0] for group in made.layers[1].groups] == kept


def test_a_corrected_layer_that_is_gone_is_never_written_uncorrected(tmp_path: Path) -> None:
    _, model = opened_wide("mixtral", tmp_path / "in")
    plan = whole_plan(model, drops(model.architecture))
    job = make_job(model, plan.expert_plan, cut=CutFiles(tmp_path / "cut"))
    with pytest.raises(CompressionError, match="its corrected tensors can no longer be read from the work folder"):
        list(job.produce(model.architecture.layers[0].decoder_layer))


@pytest.mark.parametrize("name", zoo.sweep(["mixtral", "muse_spark", "ernie4_5_vl_moe", "deepseek_v4", "qwen3_next"]))
def test_the_originals_experts_have_gone_when_a_layer_is_finished(name: str, tmp_path: Path) -> None:
    stock, model = opened_wide(name, tmp_path)
    finished = list[str]()

    class Files(CutFiles):
        def save(self, plan: LayerPlan, layer: MoeLayer, tensors: Tensors) -> None:
            loaded = {key for key, value in model.partial.model.state_dict().items() if value.device.type != "meta"}
            assert not any(key.startswith(f"{layer.name}.") for key in loaded)
            finished.append(layer.name)

    run(model, drops(model.architecture), with_heldout(stock), measure=True, files=Files(tmp_path / "cut"))
    assert finished == [layer.name for layer in model.architecture.layers]
    assert {value.device.type for value in model.partial.model.state_dict().values()} == {"meta"}


def by_sequence(original: PreTrainedModel, other: PreTrainedModel, ids: Tensor) -> list[float]:
    """KL in nats per predicted token from two plain forwards."""
    with torch.no_grad():
        one, two = (log_softmax(model(input_ids=ids).logits[:, :-1].double(), -1) for model in (original, other))
    return kl_div(two, one, reduction="none", log_target=True).sum(-1).mean(-1).tolist()


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "ernie4_5_vl_moe"])
def test_the_difference_is_that_of_whole_models_and_harm_is_undone(name: str, tmp_path: Path) -> None:
    stock, model = opened_wide(name, tmp_path / "in")
    plans, data, files = drops(model.architecture), with_heldout(stock, heldout=9), CutFiles(tmp_path / "cut")
    run(model, plans, data, correction=Correct("tune", steps=3, tokens=20), files=files)
    for layer in model.architecture.layers:  # a correction that does harm
        worse = {key: value * 3 if "experts" in key else value for key, value in files.tensors(layer).items()}
        files.save(files.plan(layer), layer, worse)  # type: ignore[arg-type]
    field, plan = zoo.family(name).count_field, whole_plan(model, plans)
    whole = ExpertPlan(len(next(iter(plans.values())).groups), tuple(plans.values()))
    plain, harmed = (cut(stock, field, plan.to_dict()) for _ in range(2))
    state = {key: value for layer in model.architecture.layers for key, value in files.tensors(layer).items()}
    harmed.load_state_dict(state, strict=False)
    kept = tuple(found for layer in model.architecture.layers if (found := files.plan(layer)) is not None)
    text = data.heldout_batches
    expected = Difference.of(*(by_sequence(stock, each, text[0]) for each in (harmed, plain)))

    better = correct(model, whole, Silent(), files, data, TUNE).layers

    found = read_difference(files)
    assert found is not None and found.accepted and found.sequences == 9
    assert found.before == pytest.approx(expected.before, rel=1e-3)
    assert found.after == pytest.approx(expected.after, rel=1e-3)
    assert found.standard_error == pytest.approx(expected.standard_error, rel=1e-2)
    assert all(plan.figures["correction"]["kept"] == "none" for plan in better)
    assert all("without" in plan.figures["correction"]["reason"] for plan in better)
    assert [plan.groups for plan in better] == [plan.groups for plan in kept]
    for layer, plan in zip(model.architecture.layers, better, strict=True):
        model.partial.load(model.partial.keys_under(layer.decoder_layer))
        expected_cut = cut_layers(model.partial.model, [layer], {layer.name: plan})
        assert files.plan(layer) == plan
        assert all(torch.equal(files.tensors(layer)[key], value) for key, value in expected_cut.items())
        model.partial.release(layer.decoder_layer)
    with paths_of("os.rename", "/cut/") as written:  # a run that goes on asks nothing anew
        assert correct(model, whole, Silent(), files, data, TUNE).layers == better
    assert not written


def test_too_little_text_undoes_nothing(tmp_path: Path) -> None:
    stock, model = opened_wide("mixtral", tmp_path / "in")
    plans, data, files = drops(model.architecture), with_heldout(stock), CutFiles(tmp_path / "cut")
    made = tuple(run(model, plans, data, correction=Correct("ridge"), files=files).values())
    whole = ExpertPlan(len(made[0].groups), made)
    assert correct(model, whole, Silent(), files, data, Correct("ridge")).layers == made
    found = read_difference(files)
    assert found is not None and not found.accepted and found.sequences == 3
