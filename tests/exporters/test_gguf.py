"""GGUF files: cut as llama.cpp's converter would write the pruned checkpoint, byte for byte, or refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compressor
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.gguf_files.blocks import find_blocks
from compressor.gguf_files.choosing import fit_plan
from compressor.gguf_files.header import open_gguf, part_names
from compressor.model.opened import open_model
from compressor.progress import Silent
from compressor.recipe.plan import Group, LayerPlan, Source
from compressor.recipe.steps_plan import Plan, PlannedStep
from tests.support import gguf_models, small
from tests.support.command_line import Run, names, refused
from tests.support.plans import Decided, by_hand, pruned

pytestmark = pytest.mark.usefixtures("offline")

OURS = {"moe_compressor.plans", "moe_compressor.version"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("checkpoint") / "model", intermediate_size=32)


def drop_plan(checkpoint: Path, kept: dict[int, list[int]]) -> Decided:
    """A plan for a checkpoint that keeps these experts of each layer."""
    model = open_model(locate(str(checkpoint)))
    layers = [LayerPlan.keep(layer, kept[layer.index]) for layer in model.architecture.layers]
    source = Source(str(checkpoint), None, model.fingerprint)
    return Decided(source, len(layers[0].groups), "by-hand", {}, None, tuple(layers))


def test_a_cut_file_is_that_of_the_pruned_checkpoint(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    layers = open_model(locate(str(checkpoint))).architecture.layers
    rng = np.random.default_rng(1)
    kept = {layer.index: sorted(rng.permutation(layer.experts)[: layer.experts - 1].tolist()) for layer in layers}
    plan = tmp_path / "plan.json"
    plan.write_text(by_hand(drop_plan(checkpoint, kept)).to_json(), encoding="utf-8")
    compressor.apply(plan, tmp_path / "pruned")
    for kind in (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0):
        made = tmp_path / f"small-{kind.name}.gguf"
        source = gguf_models.from_checkpoint(checkpoint, tmp_path / f"model-{kind.name}.gguf", kind)
        done = run("apply", plan, "--model", source, "-o", made)
        assert done.status == 0 and "The routers are those of the plan's source." in " ".join(done.out.split()), done
        wanted = gguf_models.from_checkpoint(tmp_path / "pruned", tmp_path / f"wanted-{kind.name}.gguf", kind)
        assert list(gguf_models.contents(made).items()) == list(gguf_models.contents(wanted).items())
        before, after = gguf_models.metadata(wanted), gguf_models.metadata(made)
        assert {name: value for name, value in after.items() if name not in OURS} == before
        assert json.loads(after["moe_compressor.plans"][-1])["steps"][0]["options"]["strategy"] == "by-hand"
        start, end = (gguf.GGUFReader(path).data_offset for path in (wanted, made))
        assert wanted.read_bytes()[start:] == made.read_bytes()[end:]  # the order and the padding, too
    other = gguf_models.from_checkpoint(checkpoint, tmp_path / "other.gguf", Kind.F16, router=1.5)
    told = " ".join(run("apply", plan, "--model", other, "-o", tmp_path / "small-other.gguf").out.split())
    assert "The routers are not those of the plan's source: blk.0.ffn_gate_inp.weight differs by 0.5 of its" in told
    gone = replace(Plan.load(plan), source=Source(str(tmp_path / "gone"), None, "0"))
    assert "is not available" in compressor.apply_gguf(gone, other, tmp_path / "unknown.gguf").note


@pytest.fixture(scope="module", params=[1, 3])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in several quantisations, in one file and in three."""
    return gguf_models.quantised(tmp_path_factory.mktemp("mixed") / "model.gguf", parts=request.param)


@given(data=st.data(), keep=st.integers(2, 8))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_dropping_is_slicing_bytes(data: st.DataObject, keep: int, mixed: Path, tmp_path: Path) -> None:
    source = open_gguf(mixed)
    kept = {number: sorted(data.draw(st.permutations(range(8)))[:keep]) for number in (1, 2)}
    blocks = find_blocks(source)
    layers = tuple(LayerPlan.keep(layer, kept[layer.index]) for layer in blocks.layers)
    plan = Decided(Source("model.gguf", None, blocks.fingerprint), keep, "by-hand", {}, None, layers)
    done = compressor.apply_gguf(by_hand(plan), mixed, tmp_path / "out.gguf", overwrite=True)
    assert done.out == tuple(map(str, part_names(tmp_path / "out.gguf", len(source.parts))))
    assert done.note == ""
    for part, made in zip(source.parts, map(Path, done.out), strict=True):
        before, after = gguf_models.contents(part.path), gguf_models.contents(made)
        assert list(before) == list(after)
        for name, (shape, kind, raw) in before.items():
            if any(sort in name for sort in ("_exps", "gate_inp.weight", "gate_inp.bias", "exp_probs_b")):
                size, chosen = len(raw) // 8, kept[int(name.split(".")[1])]
                raw = b"".join(raw[expert * size : (expert + 1) * size] for expert in chosen)
                shape = (keep, *shape[1:])
            assert after[name] == (shape, kind, raw), name
        facts = {**gguf_models.metadata(part.path)}
        if part is source.first:
            facts |= {"glm4moe.expert_count": keep, "general.size_label": f"{keep}x1M"}
        assert {k: v for k, v in gguf_models.metadata(made).items() if k not in OURS} == facts
    assert (done.after.bytes, done.after.parameters) == (
        sum(len(raw) for made in done.out for _, _, raw in gguf_models.contents(Path(made)).values()),
        compressor.inspect_gguf(str(mixed), keep).outcomes[0].parameters,
    )


def entries(model: Path, seed: int = 0) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """An imatrix of a model's down projections."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, (shape, _, _) in gguf_models.contents(model).items():
        if name.endswith("ffn_down_exps.weight"):
            counts = rng.integers(1, 100, shape[0])
            found[name] = rng.random((shape[0], 32 if "MXFP4" in name else shape[-1])) * counts[:, None], counts
    return found


def kept_of(path: Path, last: int = -1) -> dict[int, list[int]]:
    """The experts that the plan in a file's metadata keeps."""
    plan = json.loads(gguf_models.metadata(path)["moe_compressor.plans"][last])
    return {layer["layer"]: [group["members"][0] for group in layer["groups"]] for layer in pruned(plan)["layers"]}


def test_compress_by_an_imatrix(tmp_path: Path, run: Run) -> None:
    model = gguf_models.quantised(tmp_path / "model.gguf", head=True)
    seen = entries(model)
    del seen["blk.3.ffn_down_exps.weight"]  # llama.cpp does not run the head
    matrix = gguf_models.imatrix(tmp_path / "imatrix.gguf", seen)
    hubs = tmp_path / "hubs.json"
    hubs.write_text(json.dumps([{"layer": 2, "expert": 0, "module": "model.layers.2.mlp.experts"}]), encoding="utf-8")
    command = ["compress", model, "--imatrix", matrix, "--experts", 5, "-o", tmp_path / "small.gguf"]
    done = run(*command, "--strategy", "count-guided", "--protect", hubs)
    assert done.status == 0 and "blk.3 predicts further tokens" in done.err, done
    counts = [seen[f"blk.{number}.ffn_down_exps.weight"][1] for number in (1, 2)]
    first = sorted(np.argsort(-counts[0], kind="stable")[:5].tolist())
    order = [0, *(expert for expert in np.argsort(-counts[1], kind="stable").tolist() if expert != 0)]
    weights = {name: raw for name, (_, _, raw) in gguf_models.contents(model).items()}
    down = np.frombuffer(weights["blk.3.ffn_down_exps.weight"], np.float32).reshape(8, -1)
    scale = np.frombuffer(weights["blk.3.ffn_down_exps.scale"], np.float32)
    norms = np.linalg.norm(down * scale[:, None], axis=1)
    assert kept_of(tmp_path / "small.gguf") == {
        1: first, 2: sorted(order[:5]), 3: sorted(np.argsort(-norms, kind="stable")[:5].tolist()),
    }  # fmt: skip
    refused(run(*command), "exists already; name another output or pass --overwrite")
    plan = tmp_path / "plan.json"
    assert run("plan", *command[1:6], "-o", plan).status == 0
    assert run(*command, "--overwrite", "--json").status == 0
    by_energy = kept_of(tmp_path / "small.gguf")
    planned = Plan.load(plan).expert_plan.layers
    assert {layer.layer: [group.members[0] for group in layer.groups] for layer in planned} == by_energy
    assert run("apply", plan, "--model", model, "-o", tmp_path / "again.gguf").status == 0
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "small.gguf").read_bytes()
    refused(run("apply", plan, "-o", tmp_path / "x"), "names a GGUF file, which only inspect, plan, compress and apply")
    smaller = gguf_models.imatrix(tmp_path / "smaller.gguf", {name: (a[:5], b[:5]) for name, (a, b) in seen.items()})
    third = ["compress", tmp_path / "small.gguf", "--imatrix", smaller, "--ratio", "0.5", "-o", tmp_path / "third.gguf"]
    assert run(*third).status == 0
    assert kept_of(tmp_path / "third.gguf", 0) == by_energy
    assert all(len(experts) == 3 for experts in kept_of(tmp_path / "third.gguf").values())


def test_inspect_tells_what_there_is(tmp_path: Path, run: Run) -> None:
    model = gguf_models.quantised(tmp_path / "model.gguf", groups=4, parts=2)
    report = json.loads(run("inspect", model, "--json").out)
    assert report["quantization"] == {
        "ffn_gate_up_exps": "Q4_K in 1 block and IQ2_XXS in 1 block", "ffn_down_exps": "MXFP4",
    }  # fmt: skip
    assert (report["moe_layers"], report["layers"], report["files"], report["shared_experts"]) == (2, 3, 2, 1)
    assert report["routing"] == "top-2 of 8, 4 routing groups of which a token may use 2"
    assert [outcome["experts"] for outcome in report["outcomes"]] == [8]  # llama.cpp scores groups by two experts
    tensors = {k: v for part in part_names(model, 2) for k, v in gguf_models.contents(part).items()}
    assert report["bytes"] == sum(len(raw) for _, _, raw in tensors.values())
    assert report["parameters"] == sum(int(np.prod(shape)) for shape, _, _ in tensors.values())
    shown = run("inspect", part_names(model, 2)[1], "--experts", 8)
    assert shown.status == 0 and "MXFP4" in shown.out
    refused(run("inspect", model, "--experts", 6), "6 experts do not divide into its 4 routing groups")
    refused(run("inspect", model, "--revision", "main"), "--revision does not go with a GGUF file")


def test_what_does_not_go_is_refused_by_name(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    model = gguf_models.quantised(tmp_path / "model.gguf")
    matrix = gguf_models.imatrix(tmp_path / "imatrix.gguf", entries(model))
    old = tmp_path / "imatrix.dat"
    old.write_bytes(bytes(99))
    other = gguf_models.imatrix(tmp_path / "other.gguf", {k: (a[:4], b[:4]) for k, (a, b) in entries(model).items()})
    before = names(tmp_path)
    command = ["compress", model, "-o", tmp_path / "out.gguf", "--experts", "4", "--imatrix", matrix]
    for options, message in {
        ("--calibration", "demo"): "--calibration does not go with a GGUF file",
        ("--correct", "ridge"): "--correct does not go", ("--gate", "x"): "--gate does not go",
        ("--format", "onnx"): "--format does not go", ("--routers", "bias"): "--routers does not go",
        ("--strategy", "reap"): "no strategy 'reap' works on GGUF files; known are imatrix-energy, count-guided",
        ("--experts", "1"): "1 experts are fewer than the top-k of 2",
        ("--protect", "auto"): "--protect auto needs a checkpoint and text",
        ("--imatrix", other): "has 128 numbers, 8 experts need 256; make an imatrix of this very model",
        ("--imatrix", model): "is a GGUF file, but no importance matrix",
        ("--imatrix", tmp_path / "none"): "cannot be read",
        ("--imatrix", old): "cannot be read as GGUF: it does not begin with GGUF",
        ("-o", model): "is the model itself",
    }.items():  # fmt: skip
        refused(run(*command, *options), message)
    refused(run(*command[:-2]), "give --imatrix FILE of llama-imatrix, or apply a plan")
    refused(run("compress", checkpoint, *command[2:]), "--imatrix goes with a GGUF file")
    refused(run("inspect", tmp_path / "none.gguf"), "is not a file; name a GGUF file")
    refused(run("split", model, "-o", tmp_path / "out", "--parts", 2), "names a GGUF file, which only")
    assert names(tmp_path) == before


def test_a_plan_must_be_of_this_model_and_only_drop(checkpoint: Path, tmp_path: Path) -> None:
    model = open_gguf(gguf_models.from_checkpoint(checkpoint, tmp_path / "model.gguf", Kind.F16))
    blocks = find_blocks(model)
    plan = drop_plan(checkpoint, {layer.index: [0, 2, 3] for layer in blocks.layers})
    fitted = fit_plan(by_hand(replace(plan, protected={plan.layers[0].module: (2,)})), blocks).expert_plan
    assert fitted.protected == {"blk.0": (2,)} and fitted.layers[1].module == "blk.1"
    first, *rest = plan.layers
    pair = Group((0, 1), (0.5, 0.5), (0.5, 0.5))
    merged = replace(first, groups=(pair, *first.groups[1:]))
    text = {"source": "text"}
    after = {name: by_hand(plan) for name in ("routers", "distill")}
    after = {name: replace(made, steps=(*made.steps, PlannedStep(name))) for name, made in after.items()}
    wrong: dict[str, Decided | Plan] = {
        "merges experts": replace(plan, layers=(merged, *rest)),
        "has the step correct": replace(plan, correction={"method": "ridge"}, calibration=text),
        "has the step routers": after["routers"], "has the step distill": after["distill"],
        "has the step split": replace(plan, split={"parts": 2, "neurons": {}}),
        "says top_k 3, blk.0 has 2": replace(plan, layers=(replace(first, top_k=3), *rest)),
        "says experts 5": replace(plan, layers=(replace(first, experts=5), *rest)),
        "no entry for blk.0": replace(plan, layers=tuple(rest)),
        "speaks of layer 9, which has no experts": replace(plan, layers=(*rest, replace(first, layer=9))),
        "the routers differ": replace(plan, source=Source("a", None, "gguf:0")),
    }  # fmt: skip
    for message, changed in wrong.items():
        with pytest.raises(CompressionError, match=message):
            fit_plan(changed if isinstance(changed, Plan) else by_hand(changed), blocks)


def test_routing_groups_of_the_file_count(tmp_path: Path) -> None:
    model = open_gguf(gguf_models.quantised(tmp_path / "model.gguf", groups=2))
    blocks = find_blocks(model)
    facts = [replace(layer, routing_groups=1, experts_per_group=1) for layer in blocks.layers]
    for kept, message in (([0, 1, 2, 4], "keep equally many"), ([0, 4], "at least 2 experts in a group")):
        layers = tuple(LayerPlan.keep(layer, kept) for layer in facts)
        plan = Decided(Source("a", None, blocks.fingerprint), len(kept), "x", {}, None, layers)
        with pytest.raises(CompressionError, match=message):
            fit_plan(by_hand(plan), blocks)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_fault_while_writing_leaves_what_was_there(parts: int, tmp_path: Path) -> None:
    model = gguf_models.quantised(tmp_path / "model.gguf", parts=parts)
    matrix = gguf_models.imatrix(
        tmp_path / "imatrix.gguf", {f"blk.{n}.ffn_down_exps.weight": (np.ones((8, 32)), np.arange(8)) for n in (1, 2)}
    )
    out = tmp_path / "out.gguf"
    made = compressor.compress_gguf(model, out, imatrix=matrix, experts=6)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    class Full(Silent):
        def advance(self, detail: str) -> None:
            if detail == "blk.2.ffn_norm.weight":
                raise OSError(28, "No space left on device")

    for overwrite, target in ((True, out), (False, tmp_path / "new.gguf")):
        with pytest.raises(CompressionError, match="is full; free some space"):
            compressor.compress_gguf(model, target, imatrix=matrix, experts=4, overwrite=overwrite, progress=Full())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    Path(made.out[0]).write_text("mine", encoding="utf-8")
    with pytest.raises(CompressionError, match="is no GGUF file, so --overwrite will not replace it"):
        compressor.compress_gguf(model, out, imatrix=matrix, experts=4, overwrite=True)
