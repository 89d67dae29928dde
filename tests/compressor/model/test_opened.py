"""How many experts stay: --experts and --ratio, with and without routing groups; opening what does not fit together."""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import modeling_utils

from compressor.answers.hf_model import HfModel
from compressor.answers.stock import load_writing
from compressor.checkpoint.source import locate
from compressor.devices import pick_device
from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer, resolve_count
from compressor.model.opened import open_model, pick_dtype
from tests.support import small, zoo


def layer(experts: int = 8, top_k: int = 2, **details: Any) -> MoeLayer:
    return MoeLayer("layers.0.experts", "layers.0", "layers.0.gate", "layers.0", 0, experts, top_k, **details)


@given(st.integers(1, 300), st.floats(0, 1, exclude_max=True))
def test_no_more_than_the_ratio_goes_and_no_less_than_can(experts: int, ratio: float) -> None:
    kept = resolve_count((layer(experts, top_k=1),), None, ratio)
    assert 1 <= kept <= experts
    assert (experts - kept) / experts <= ratio
    assert kept == 1 or (experts - kept + 1) / experts > ratio


@given(st.integers(1, 8), st.integers(2, 16), st.integers(0, 100))
def test_routing_groups_stay_equal_under_a_ratio(groups: int, size: int, percent: int) -> None:
    assume(percent < 100)
    experts, ratio = groups * size, percent / 100
    entry = layer(experts, top_k=1, routing_groups=groups, chosen_groups=groups)
    kept = resolve_count((entry,), None, ratio)
    assert kept % groups == 0
    assert Fraction(experts - kept, experts) <= Fraction(percent, 100)
    assert kept == groups or Fraction(experts - kept + groups, experts) > Fraction(percent, 100)


def test_ratios_by_hand() -> None:
    counts = {0.0: 8, 0.1: 8, 0.125: 7, 0.25: 6, 0.3: 6, 0.49999999999: 5, 0.5: 4, 0.75: 2}
    assert {ratio: resolve_count((layer(),), None, ratio) for ratio in counts} == counts
    assert [resolve_count((layer(),), count, None) for count in (8, 2)] == [8, 2]
    assert resolve_count((layer(100),), None, 0.29) == 71  # 100 * 0.29 is 28.999999999999996
    assert resolve_count((layer(8, routing_groups=4, chosen_groups=4),), None, 0.3) == 8


IN_FOUR, IN_TWO = {"routing_groups": 4, "chosen_groups": 4}, {"routing_groups": 2, "chosen_groups": 1}
GROUPS, EIGHT = "routing groups", "keep at least 8"
REFUSALS: list[tuple[dict[str, Any], int | None, float | None, str]] = [
    ({}, None, None, "either --experts N or --ratio R"),
    ({}, 4, 0.5, "either --experts N or --ratio R"),
    ({}, 9, None, "layers.0.experts: 9 experts asked for, it has 8"),
    ({}, 1, None, "1 experts are fewer than the top-k of 2"),
    ({}, 0, None, "0 experts are fewer than the top-k of 2"),
    ({}, None, 1.0, r"--ratio 1\.0 is not a share"),
    ({}, None, math.nan, "--ratio nan is not a share"),
    ({}, None, math.inf, "--ratio inf is not a share"),
    ({}, None, 0.99, "1 experts are fewer than the top-k of 2"),
    ({"routing_groups": 2, "chosen_groups": 2}, 5, None, "5 experts do not divide into its 2 routing groups"),
    ({**IN_FOUR, "experts_per_group": 2}, 4, None, f"leave 1 in each of its 4 {GROUPS}, its router needs 2; {EIGHT}"),
    ({**IN_TWO, "top_k": 4}, 6, None, f"leave 3 within a token's 1 {GROUPS}, fewer than the top-k of 4; {EIGHT}"),
]


@pytest.mark.parametrize(("details", "experts", "ratio", "message"), REFUSALS)
def test_impossible_counts_are_refused(details: Any, experts: Any, ratio: float | None, message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        resolve_count((layer(**details),), experts, ratio)


def test_every_layer_is_asked() -> None:
    with pytest.raises(CompressionError, match=r"layers\.0\.experts: 3 experts are fewer than the top-k of 4"):
        resolve_count((layer(), layer(top_k=4)), 3, None)


@pytest.mark.parametrize("name", ["nope", "meta", "cuda:99", ""])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(CompressionError, match=r"cannot be used .*pass --device cpu or auto"):
        pick_device(name)


def test_devices_and_dtypes(tmp_path: Path) -> None:
    assert pick_device("cpu") == torch.device("cpu")
    model = open_model(locate(str(small.save(tmp_path / "model"))))
    assert model.partial.dtype == torch.float32
    assert pick_dtype("bfloat16", model.config, model.checkpoint) == torch.bfloat16
    with pytest.raises(CompressionError, match="no dtype 'int8'; known are auto, float32, bfloat16, float16"):
        pick_dtype("int8", model.config, model.checkpoint)


def config(**fields: Any) -> Callable[[Path], Any]:
    return lambda folder: small.edit_json(folder / "config.json", lambda content: content.update(fields))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    return lambda folder: small.edit_tensors(folder, change)


EXPERT = "model.layers.1.block_sparse_moe.experts.7.w2.weight"
UNFIT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no model type": (lambda f: (f / "config.json").write_text("{}"), "transformers cannot read .*config.json"),
    "unknown type": (config(model_type="nope", architectures=["Nope"]), "has no model type 'nope', and code"),
    "remote code": (config(model_type="nope", auto_map={"AutoConfig": "x.Y"}), "transformers cannot read"),
    "stock class": (config(model_type="nope", architectures=["MixtralForCausalLM"]), "of type 'mixtral'; write"),
    "count is text": (config(num_local_experts="eight"), "Validation error for field 'num_local_experts'"),
    "negative count": (config(num_local_experts=-1), "cannot build MixtralForCausalLM"),
    "no experts": (config(num_local_experts=0), "routers beside its experts"),
    "fewer experts": (config(num_local_experts=7), "holds 8 tensors like .* for 7 experts"),
    "more experts": (config(num_local_experts=16), "holds 8 tensors like .* for 16 experts"),
    "unknown dtype": (config(dtype="float99"), "float99"),
    "expert tensor gone": (tensors(lambda t: t.pop(EXPERT)), "layers.1.*holds 7 tensors like .*w2.* for 8 experts"),
    "expert numbered 9": (
        tensors(lambda t: t.update({EXPERT.replace("experts.7.", "experts.9."): t.pop(EXPERT)})),
        "layers.1.*no tensor like .* of expert 7",
    ),
    "expert's shape": (
        tensors(lambda t: t.update({EXPERT: torch.zeros(5, 5)})),
        r"'model.layers.1.block_sparse_moe.experts.7.w2.weight' has shape \[5, 5\]",
    ),
    "dense": (
        lambda f: (f / "config.json").write_text('{"model_type": "llama", "vocab_size": 9, "num_hidden_layers": 0}'),
        r"LlamaForCausalLM \(llama\) has no experts module .* it is a dense model",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(name: str, tmp_path: Path) -> None:
    damage, message = UNFIT[name]
    folder = small.save(tmp_path / "model")
    damage(folder)
    with pytest.raises(CompressionError, match=message) as fault:
        open_model(locate(str(folder)))
    assert "\n" not in str(fault.value)


def _name_kernels(folder: Path) -> None:
    """Have the config, and every config in it, name a repository of kernels for attention and experts."""

    def name(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        evil = {"_attn_implementation": "evil/kernels", "_experts_implementation": "deepgemm"}
        return {key: name(value) for key, value in node.items()} | (evil if "model_type" in node else {})

    path = folder / "config.json"
    path.write_text(json.dumps(name(json.loads(path.read_text()))))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_vl_moe"])
def test_a_config_names_no_kernels(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = zoo.save(family, tmp_path / "model")
    asked: list[str] = []
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda name, *_, **__: asked.append(name))
    wanted = [getattr(module, "config", stock.config)._attn_implementation for module in stock.modules()]
    _name_kernels(tmp_path / "model")
    loaders: list[Callable[[Path], Any]] = [lambda folder: open_model(locate(str(folder))).partial.model]
    if family == "mixtral":
        loaders.append(lambda folder: load_writing(folder, "cpu", "auto"))
        loaders.append(lambda folder: HfModel.AUTO_MODEL_CLASS.from_pretrained(str(folder)))
    for load in loaders:
        configs = [getattr(module, "config", None) for module in load(tmp_path / "model").modules()]
        found = [config for config in configs if config is not None]
        assert {config._attn_implementation for config in found} <= set(wanted)
        assert {config._experts_implementation for config in found} <= {None, "grouped_mm", "eager"}
    assert not asked
