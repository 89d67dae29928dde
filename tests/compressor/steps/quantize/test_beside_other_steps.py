"""`quantize` among other steps: what it may stand before and after, what comes of it, and the bytes that it takes."""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import Tensor

import compressor
from compressor.api import make_recipe
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import open_model
from compressor.recipe.recipe import default_steps
from compressor.recipe.step import StepOptions
from compressor.steps import workdir
from compressor.steps.job import untouched
from compressor.steps.quantize.matrices import find_matrices
from compressor.steps.quantize.scheme import scheme_for
from compressor.steps.quantize.writing import Writer
from tests.support import fake_quantization, mtp_checkpoints, quantized, small, zoo
from tests.support.audit import at_every
from tests.support.command_line import Run, refused
from tests.support.quantized import plain_model, save_compressed_tensors, save_fp8

pytestmark = [pytest.mark.usefixtures("offline"), pytest.mark.filterwarnings("ignore")]

SIZES: dict[str, Any] = {"samples": 16, "sequence_length": 32}
ROUTERS = {"rounds": 1, "sequences": 8, "sequence_length": 32}
TRAINED = {"steps": 2, "tokens_per_step": 64, "sequence_length": 32}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    small.text_file(tmp_path)
    return small.save(tmp_path / "model", intermediate_size=64)


def compressed(model: Path, steps: Sequence[StepOptions], out: str = "out") -> Path:
    folder = model.parent / out
    text = str(model.parent / "calibration.txt")
    compressor.compress(str(model), folder, list(steps), calibration=text, **SIZES)
    return folder


def stock(folder: Path) -> Any:
    return fake_quantization.decompressed(transformers.AutoModelForCausalLM.from_pretrained(folder))


def same(first: Any, second: Any, but: str = "-") -> bool:
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    return all(torch.equal(value, other[name]) for name, value in one.items() if but not in name)


def packed(folder: Path) -> dict[str, Tensor]:
    return {name: value for name, value in load_file(folder / "model.safetensors").items() if ".weight_" in name}


REAP = compressor.Prune(strategy="reap", experts=4)


def refitted(prune: compressor.Prune, method: str, **options: Any) -> compressor.Prune:
    return prune.model_copy(update={"correct": compressor.Correct(method, **options)})


@pytest.mark.parametrize(
    ("before", "scheme"),
    [
        zoo.full([REAP], "int4"),
        zoo.full([refitted(REAP, "ridge")], "int4"),
        zoo.full([refitted(REAP, "tune", steps=2)], "int4"),
        ([compressor.Prune(strategy="reap", ratio=0.5, split=2)], "mxfp4"),
        ([REAP, compressor.Distill("experts", **TRAINED)], "int8"),
    ],
)
def test_what_earlier_steps_have_made_is_quantised(before: list[StepOptions], scheme: str, model: Path) -> None:
    plain = stock(compressed(model, before, "plain"))
    out = compressed(model, [*before, compressor.Quantize(scheme)])
    fake_quantization.quantize(plain, scheme, 32)
    assert same(stock(out), plain)


@pytest.mark.parametrize("later", [zoo.full(compressor.Routers(**ROUTERS)), compressor.Distill("router", **TRAINED)])
def test_routers_are_moved_once_experts_are_packed(later: StepOptions, model: Path) -> None:
    first = [REAP, compressor.Quantize("int2")]
    before, out = compressed(model, first, "before"), compressed(model, [*first, later])
    assert packed(before).keys() == packed(out).keys()
    assert all(torch.equal(value, packed(out)[name]) for name, value in packed(before).items())
    result = json.loads((out / "compression.json").read_text())["plan"]["steps"][-1]["result"]
    assert result["after"] < result["before"]
    assert same(stock(out), stock(before), "mlp.gate.weight") and not same(stock(out), stock(before))


PACKED, DIVIDE = compressor.Quantize(), "quantize: groups of 32 do not divide matrices of 16, 32 columns; "


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([PACKED, compressor.Prune(experts=4, correct="ridge")],
         r"steps\[1\]: prune cannot stand after quantize: it would write the experts that it refits unquantised"),
        ([PACKED, compressor.Prune(split=2)], r"steps\[1\]: prune cannot stand after quantize"),
        ([PACKED, PACKED], r"steps\[1\]: quantize cannot stand after quantize: weights"),
        ([compressor.Constants(experts=4), PACKED],
         r"steps\[1\]: quantize cannot stand after constants: stock transformers cannot load constants"),
        ([PACKED, compressor.Constants(experts=4)], r"steps\[1\]: constants cannot stand after quantize"),
        ([PACKED, compressor.Prune(strategy="hc-smoe", experts=4)],
         r"steps\[1\]: quantize has packed experts that can only be merged, or dropped, once they are dequantised"),
        *(([PACKED, compressor.Distill(train, **TRAINED)],
           f"distill: train {train} changes weights that quantize has packed; put distill before quantize, or give")
          for train in ("experts", "lora", "all")),
        ([compressor.Prune(ratio=0, split=4), compressor.Quantize(scheme="int4", group_size=32)],
         f"{DIVIDE}give group_size 16 or 8 or -1$"),
        ([compressor.Prune(strategy="reap", ratio=0.5, split=4), compressor.Quantize(scheme="mxfp4")],
         f"{DIVIDE}choose int4 or fp8$"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(steps: list[StepOptions], sentence: str, model: Path) -> None:
    with pytest.raises(CompressionError, match=f"^{sentence}"):
        compressed(model, steps)
    assert not (model.parent / "out").exists()


def test_packed_experts_are_dropped_as_they_are(model: Path) -> None:
    prune = compressor.Prune(strategy="aimer", experts=4)
    first = compressed(model, [compressor.Quantize("int4")], "first")
    out = compressed(model, [compressor.Quantize("int4"), prune])
    then = compressed(first.rename(model.parent / "one"), [prune], "then")
    trees = [small.tree(folder) for folder in (out, then)]
    for tree in trees:
        for name in ("compression.json", "receipt.json", "recipe.yaml", "SHA256SUMS"):  # of which runs are told
            del tree[name]
    assert trees[0] == trees[1]
    kept = packed(out)
    before = packed(model.parent / "one")
    assert len(kept) == len(before) / 2
    pool = {bytes(value.numpy().tobytes()) for value in before.values()}
    assert {bytes(value.numpy().tobytes()) for value in kept.values()} <= pool


@pytest.mark.parametrize(
    ("save", "targets"),
    [(lambda folder: save_fp8(folder), "experts"), zoo.full(lambda folder: save_compressed_tensors(folder), "all")],
)
def test_a_quantised_source_is_dequantised_layer_by_layer(save: Any, targets: str, tmp_path: Path) -> None:
    """Its own packed attention and dense layers are written plain, if they aren't quantised again."""
    save(tmp_path / "model")
    base = plain_model(tmp_path / "model", torch.bfloat16)
    made = compressor.compress(
        str(tmp_path / "model"), tmp_path / "out", [compressor.Quantize("int3", targets=targets)]
    )
    plan = made.plan.steps[0].decision
    assert plan is not None and plan["dequantized"] is True
    fake_quantization.quantize(base, "int3", 32, targets)
    assert same(stock(tmp_path / "out"), base)
    assert "which were dequantised first" in made.sections[0].summary
    stored = load_file(tmp_path / "out" / "model.safetensors")
    of_experts = {name for name in stored if ".weight_" in name and ".experts." in name}
    assert targets == "all" or of_experts == {name for name in stored if ".weight_" in name}


@pytest.mark.parametrize("name", ["deepseek_v3", zoo.full("qwen3_next"), zoo.full("glm4_moe")])
def test_heads_of_further_tokens_stay_plain(name: str, tmp_path: Path) -> None:
    source = mtp_checkpoints.make(name, tmp_path / "model", moe_intermediate_size=32)
    compressor.compress(str(source.folder), tmp_path / "out", [compressor.Quantize("int4", targets="all")])
    before, after = source.tensors, mtp_checkpoints.tensors_of(tmp_path / "out")
    own = source.owned(before)
    assert own and own == source.owned(after) and all(torch.equal(before[key], after[key]) for key in own)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    linear = {key.removesuffix(".weight") for key in own if key.endswith("weight") and before[key].dim() == 2}
    assert {name for name in linear if "embed" not in name} <= set(ignored)
    assert not fake_quantization.packed_modules(after) & set(ignored)
    compressor.inspect(str(tmp_path / "out"))


@pytest.mark.parametrize("method", ["rtn", zoo.full("gptq")])
def test_a_recipe_and_a_plan_repeat_the_bytes(method: str, run: Run, model: Path) -> None:
    text, sizes = model.parent / "calibration.txt", ("--samples", 16, "--sequence-length", 32)
    ask = (model, "--experts", 4, "--strategy", "reap", "--correct", "ridge", "--quantize", "int3")
    ask = (*ask, "--set", f"quantize.method={method}", "--calibration", text, *sizes)
    places = {name: model.parent / name for name in ("out", "again", "planned")}
    assert run("compress", *ask, "-o", places["out"]).status == 0
    assert run("compress", places["out"] / "recipe.yaml", "-o", places["again"]).status == 0
    assert run("plan", *ask, "-o", model.parent / "plan.json").status == 0
    assert run("apply", model.parent / "plan.json", "-o", places["planned"]).status == 0
    trees = [small.tree(folder) for folder in places.values()]
    assert trees[0] == trees[1] == trees[2]
    recipe = yaml.safe_load((places["out"] / "recipe.yaml").read_text())
    assert recipe["steps"][-1] == {"quantize": {"scheme": "int3"} | ({} if method == "rtn" else {"method": "gptq"})}


def test_the_option_quantize(run: Run, model: Path) -> None:
    assert run("compress", model, "--quantize", "int2", "-o", model.parent / "out").status == 0
    done = json.loads((model.parent / "out" / "compression.json").read_text())["plan"]["steps"]
    assert [(step["name"], step["options"]["scheme"]) for step in done] == [("quantize", "int2")]
    refused(
        run("compress", model, "--quantize", "int5", "-o", model.parent / "no"),
        "scheme should .*'int5'",
    )
    for size, fault in (
        (0, "group_size is 0; give the columns that share a scale, or -1"),
        (-2, "group_size should be greater than or equal to -1"),
    ):
        asked = ("--quantize", "int4", "--set", f"quantize.group_size={size}", "-o", model.parent / "no")
        refused(run("compress", model, *asked), fault)
    names = [step.name for step in default_steps(experts=4, distill="router", quantize={"scheme": "fp8"})]
    assert names == ["prune", "distill", "quantize"]
    assert [step.name for step in default_steps(quantize="int4")] == ["quantize"]


PRUNE = compressor.Prune(strategy="reap", experts=4)
FP8 = {"vocab_size": small.VOCABULARY}


def tokenized(folder: Path, save: Callable[[Path], Any]) -> None:
    save(folder)
    small.tokenizer().save_pretrained(folder)


CASES: dict[str, tuple[Callable[[Path], Any], list[StepOptions]]] = {
    "alone": (lambda folder: small.save(folder, intermediate_size=64), [compressor.Quantize("int4", targets="all")]),
    "fused": (lambda folder: small.save(folder, "gpt_oss", intermediate_size=64), [compressor.Quantize("int3")]),
    "shared": (
        lambda folder: small.save(folder, "ernie4_5_vl_moe", **{"text_config.vocab_size": small.VOCABULARY}),
        [compressor.Quantize("fp8", targets="all")],
    ),
    "pruned": (
        lambda folder: small.save(folder, "deepseek_v3", moe_intermediate_size=32),
        [refitted(PRUNE, "ridge"), compressor.Quantize("mxfp4")],
    ),
    "split": (
        lambda folder: small.save(folder, "qwen3_moe", moe_intermediate_size=64),
        [PRUNE.model_copy(update={"split": 2}), compressor.Quantize("nvfp4", targets="all")],
    ),
    "dropped": (lambda folder: small.save(folder), [compressor.Quantize("int2"), PRUNE]),
    "of FP8": (
        lambda folder: tokenized(folder, lambda f: quantized.save_fp8(f, sizes=FP8)),
        [compressor.Quantize("int2")],
    ),
}
FAST = {"alone", "pruned"}


@pytest.mark.parametrize("case", [case if case in FAST else zoo.full(case) for case in CASES])
def test_a_dry_run_shows_the_bytes_that_are_written(case: str, tmp_path: Path) -> None:
    save, steps = CASES[case]
    save(tmp_path / "model")
    recipe = make_recipe(str(tmp_path / "model"), steps, str(small.text_file(tmp_path)), 16, 32)
    shown = compressor.dry_run(recipe)
    made = compressor.compress(recipe, tmp_path / "out")
    files = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert shown.after.bytes == made.after.bytes == sum(value.nbytes for file in files for value in file.values())
    assert shown.after.bytes < shown.before.bytes
    experts = sum(value.nbytes for file in files for name, value in file.items() if ".experts." in name)
    assert experts <= shown.after.layer_bytes * shown.moe_layers < 2 * experts  # with routers
    if case != "dropped":  # of which packed numbers are counted as they are stored
        assert shown.after.parameters == made.after.parameters


STAGES: dict[str, list[StepOptions]] = {
    "alone": [compressor.Quantize("int4")],
    "gptq": [compressor.Quantize("int4", method="gptq")],
    "pruned": [PRUNE, compressor.Quantize("int4")],
    "corrected": [refitted(PRUNE, "ridge"), compressor.Quantize("int4", method="gptq")],
}


@pytest.mark.parametrize("case", ["alone", "pruned", zoo.full("gptq"), zoo.full("corrected")])
def test_the_space_that_is_asked_for_is_what_a_run_takes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all files of tensors in the work folder but those of the output, which have a second name."""
    text: dict[str, Any] = {"calibration": str(small.text_file(tmp_path)), "samples": 16, "sequence_length": 32}
    asked = (str(small.save(tmp_path / "model", intermediate_size=256)), tmp_path / "out", STAGES[case])
    work, taken = tmp_path / ".out.moe-compressor", [0]
    with at_every("os.rename", lambda: taken.append(tensor_bytes(work))):
        compressor.compress(*asked, **text)
    shutil.rmtree(tmp_path / "out")
    usage = shutil.disk_usage(tmp_path)
    for share in (0.9, 1.1):
        free = int(share * max(taken)) + workdir.SPARE_BYTES + 4096 * (share > 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        with nullcontext() if share > 1 else pytest.raises(CompressionError, match="the output needs"):
            compressor.compress(*asked, **text)
        assert (tmp_path / "out").exists() == (share > 1)


def tensor_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.safetensors*"):
        with suppress(FileNotFoundError):  # one that is being renamed
            total += path.stat().st_size if "output" not in path.parts else 0
    return total


@pytest.mark.parametrize("save", [save_fp8, lambda folder: small.save(folder, "gpt_oss")])
def test_one_layer_at_a_time_is_in_memory(save: Callable[[Path], Any], tmp_path: Path) -> None:
    save(tmp_path / "in")
    model = open_model(locate(str(tmp_path / "in")), device="cpu")
    matrices = find_matrices(model, "experts")
    scheme = scheme_for("int2", 8, {matrix.columns for matrix in matrices.every})
    schemes = {layer: {"experts": scheme} for layer in model.architecture.decoder_layers}
    writer = Writer(model, schemes, matrices, tmp_path / "kept")
    job = writer.job(untouched(model))
    for decoder_layer in job.decoder_layers:
        assert sum(len(b"".join(pieces)) for _, pieces in job.produce(decoder_layer)) > 0
        state = writer.partial.model.state_dict()
        assert not [key for key, value in state.items() if ".layers." in key and not value.is_meta]
