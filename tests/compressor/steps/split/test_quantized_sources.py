"""Splits of quantised checkpoints cut as they are stored: equal to dequantised ones, rebuilt, pruned; or plain."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import compressor
from compressor.checkpoint.source import locate
from compressor.model.opened import open_model
from compressor.progress import SILENT
from compressor.recipe.plan import LayerPlan
from compressor.recipe.steps_plan import Plan
from compressor.steps.split.view import as_decided, packed, partitioned, seen_as, unpacked
from tests.support import zoo
from tests.support.per_expert_checkpoints import save_packed
from tests.support.plans import Decided, by_hand
from tests.support.quantized import plain_model, save_compressed_tensors, save_fp8, save_modelopt, save_mxfp4

pytestmark = pytest.mark.usefixtures("offline")

Save = Callable[[Path], None]
UNGROUPED = {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 64}
MXFP4 = "mxfp4-pack-quantized"
WIDE = {"intermediate_size": 64}
CASES: dict[str, tuple[Save, int]] = {  # and the neurons that stay together
    "fp8-qwen3_moe": (lambda folder: save_fp8(folder, sizes={"moe_intermediate_size": 64}), 16),
    "fp8-deepseek_v3": (lambda folder: save_fp8(folder, "deepseek_v3", sizes=UNGROUPED), 16),
    "mxfp4-gpt_oss": (lambda folder: save_mxfp4(folder, sizes={"intermediate_size": 128}), 32),
    "packed-asymmetric": (lambda folder: save_compressed_tensors(folder, "mixtral", symmetric=False), 16),
    "float-qwen3_moe": (lambda folder: save_compressed_tensors(folder, "qwen3_moe", "float-quantized"), 1),
    "nvfp4-qwen3_moe": (lambda folder: save_compressed_tensors(folder, format="nvfp4-pack-quantized"), 16),
    "mxfp4-mixtral": (lambda folder: save_compressed_tensors(folder, "mixtral", MXFP4, sizes=WIDE), 32),
    "modelopt-nvfp4": (save_modelopt, 16),
    "modelopt-fp8": (lambda folder: save_modelopt(folder, algorithm="FP8", declared=["config.json"]), 1),
    "int8-mixtral": (lambda folder: save_compressed_tensors(folder, "mixtral", "int-quantized"), 1),
}
FEW = ("fp8-qwen3_moe", "mxfp4-gpt_oss")  # without `make test-all`


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def same_bytes(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    def raw(value: torch.Tensor) -> torch.Tensor:
        return value.contiguous().view(-1).view(torch.uint8)

    return first.keys() == second.keys() and all(torch.equal(raw(first[key]), raw(second[key])) for key in first)


@pytest.mark.parametrize("case", [case if case in FEW else zoo.full(case) for case in CASES])
def test_stored_bytes_are_cut_and_mean_what_the_dequantised_split_does(case: str, tmp_path: Path) -> None:
    save, block = CASES[case]
    source, out = tmp_path / "model", tmp_path / "out"
    save(source)
    compressor.compress(str(source), out, [compressor.Prune(ratio=0, split=2)])
    made = Plan.from_dict(json.loads((out / "compression.json").read_text())["plan"])
    plan = made
    assert plan.split is not None and plan.split["block"] == block
    assert {value.dtype for value in weights(out).values()} == {value.dtype for value in weights(source).values()}

    split, written = (
        as_decided(open_model(locate(str(source))), plan.split, plan.expert_plan.top_k),
        open_model(locate(str(out))),
    )  # both in bfloat16
    for partial in (split.partial, written.partial):
        partial.load(partial.empty)
    wanted, found = (each.partial.model.state_dict() for each in (split, written))
    assert same_bytes({key: wanted[key] for key in found}, dict(found))

    before, after = plain_model(source), plain_model(out)  # by formulas of our own, in float32
    ids = zoo.tokens(before)
    logits = zoo.logits(before, ids)
    assert float((zoo.logits(after, ids) - logits).abs().max() / logits.abs().max()) < 2e-6
    modules = zoo.experts(plain_model(source, torch.bfloat16))
    for name, text in plan.split["neurons"].items():
        energy = energies(modules[name], "gpt_oss" in case)
        experts, width = energy.shape
        first = unpacked(text, experts, width, 2, name) == 0
        sums = energy.unflatten(1, (-1, block)).sum(-1)
        chosen = sums >= sums.median(dim=1, keepdim=True).values.nextafter(torch.tensor(torch.inf).double())
        assert torch.equal(first, chosen.repeat_interleave(block, 1))

    compressor.apply(made, tmp_path / "again", model=str(source))
    assert same_bytes(weights(out), weights(tmp_path / "again"))
    assert (out / "config.json").read_bytes() == (tmp_path / "again" / "config.json").read_bytes()
    whole = Decided(made.source, 16, made.strategy, {}, made.calibration, (), made.seed, split=made.split)
    check_drop(whole, source, out, tmp_path)


def test_packed_experts_of_a_family_that_fuses_plain_ones_are_split_as_stored(tmp_path: Path) -> None:
    model = save_packed("gpt_oss", tmp_path / "model", intermediate_size=32)
    compressor.compress(str(tmp_path / "model"), tmp_path / "out", [compressor.Prune(ratio=0, split=2)])
    written = open_model(locate(str(tmp_path / "out")), "float32", "cpu")
    assert written.architecture.experts == 16 and written.layout.quantized
    written.partial.load(written.partial.empty)
    ids = zoo.tokens(model)
    logits = zoo.logits(model, ids)
    assert float((zoo.logits(written.partial.model, ids) - logits).abs().max() / logits.abs().max()) < 2e-6


def energies(experts: Any, interleaved: bool) -> torch.Tensor:
    """|gate row| |up row| |down column| of every neuron, [E, I]."""
    rows, down = experts.gate_up_proj.detach().double(), experts.down_proj.detach().double()
    rows, down = (rows.mT, down.mT) if interleaved else (rows, down)
    gate, up = (rows[:, 0::2], rows[:, 1::2]) if interleaved else rows.chunk(2, dim=1)
    found: torch.Tensor = gate.norm(dim=2) * up.norm(dim=2) * down.norm(dim=1)
    return found


def check_drop(whole: Decided, source: Path, split_folder: Path, place: Path) -> None:
    """Dropping parts on the way gives what dropping them from the written split gives; equal rows are told apart."""
    kept = (0, 1, 2, 4, 5, 7, 8, 9, 13, 15)
    split = open_model(locate(str(split_folder)))
    layers = tuple(LayerPlan.keep(layer, kept) for layer in split.architecture.layers)
    once = replace(whole, layers=layers, experts=len(kept))
    later = replace(once, source=replace(whole.source, fingerprint=split.fingerprint), split=None)
    compressor.apply(by_hand(once), place / "once", model=str(source))
    compressor.apply(by_hand(later), place / "later", model=str(split_folder))
    first, second = (weights(place / name) for name in ("once", "later"))
    assert same_bytes(first, second)
    configs = [json.loads((place / name / "config.json").read_text()) for name in ("once", "later")]
    assert configs[0] == configs[1] and configs[0]["quantization_config"]
    routers = [value for name, value in first.items() if name.endswith((".gate.weight", "router.weight"))]
    assert routers and all(len(router.unique(dim=0)) == len(kept) for router in routers)


def test_a_merge_of_parts_is_written_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CASES["fp8-qwen3_moe"][0](tmp_path / "model")
    done = compressor.compress(str(tmp_path / "model"), tmp_path / "out", strategy="model-centric", experts=6, split=2)
    assert not done.plan.expert_plan.is_drop and "so all weights are written in bfloat16" in caplog.text
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert {value.dtype for value in weights(tmp_path / "out").values()} == {torch.bfloat16}


def test_an_order_that_tears_blocks_apart_is_written_plain(tmp_path: Path) -> None:
    CASES["fp8-qwen3_moe"][0](tmp_path / "model")
    compressor.compress(str(tmp_path / "model"), tmp_path / "split", [compressor.Prune(ratio=0, split=2)])
    plan = json.loads((tmp_path / "split" / "compression.json").read_text())["plan"]
    (step,) = plan["steps"]
    own = step["plan"]["split"]
    names = list(own["neurons"])
    dealt = {name: (torch.arange(64) % 2).int().expand(8, -1).contiguous() for name in names}
    torn = {"neurons": {name: packed(each, 2) for name, each in dealt.items()}}
    free = {name: value for name, value in {**own, **torn}.items() if name != "block"}
    compressor.apply(
        Plan.from_dict({**plan, "steps": [{**step, "plan": {**step["plan"], "split": free}}]}),
        tmp_path / "out",
        model=str(tmp_path / "model"),
    )
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def _names_one_expert(folder: Path) -> None:
    save_fp8(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "model.layers.0.mlp.experts.5.up_proj"]
    (folder / "config.json").write_text(json.dumps(config))


def _has_unknown_companions(folder: Path) -> None:
    save_fp8(folder)
    tensors = load_file(folder / "model.safetensors")
    more = {name.removesuffix("_scale_inv") + "_more": torch.ones(1) for name in tensors if name.endswith("_scale_inv")}
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})


PLAIN: dict[str, tuple[Save, int, str]] = {
    "torn blocks": (save_fp8, 4, "parts of 8 neurons are not made of whole blocks of 16"),
    "torn mxfp4": (save_mxfp4, 2, "parts of 16 neurons are not made of whole blocks of 32"),
    "torn groups": (save_compressed_tensors, 4, "parts of 8 neurons are not made of whole blocks of 16"),
    "three": (lambda folder: save_fp8(folder, sizes={"moe_intermediate_size": 48}), 3, "scales times 3 are rounded"),
    "one expert named": (_names_one_expert, 2, "its quantization_config speaks of single experts"),
    "unknown companions": (_has_unknown_companions, 2, "how .*weight_more is stored is not known"),
}


@pytest.mark.parametrize("case", PLAIN)
def test_what_cannot_be_cut_as_stored_is_written_plain_and_said_so(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save, parts, reason = PLAIN[case]
    save(tmp_path / "model")
    split = seen_as(open_model(locate(str(tmp_path / "model"))), parts)
    with caplog.at_level(logging.WARNING):
        assert partitioned(split, None, SILENT, 0, changed=False).stored_parts is None
    assert re.search(f"its parts are written in a plain dtype: {reason}", caplog.text)


def test_experts_that_will_be_changed_are_dealt_out_freely(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_fp8(tmp_path)
    split = seen_as(open_model(locate(str(tmp_path))), 2)
    cut = partitioned(split, None, SILENT, 0, changed=False)
    assert cut.stored_parts is split.stored_parts and cut.stored_parts.block == 16 and not caplog.text
    with caplog.at_level(logging.WARNING):
        assert partitioned(split, None, SILENT, 0, changed=True).stored_parts is None
    assert "its parts are written in a plain dtype: what changes experts needs one" in caplog.text
