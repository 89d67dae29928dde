"""Outputs: finished layers on disk, files that travel, equal router rows told apart, overflows refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compressor
from compressor.errors import CompressionError
from compressor.model.architecture import discover
from compressor.recipe.plan import Group
from compressor.recipe.steps_plan import Plan
from compressor.steps.cutting import CutFiles
from compressor.steps.job import carried_files
from compressor.steps.tensors import STEP, distinct_rows
from tests.support import small, zoo
from tests.support.plans import plan_of
from tests.support.sequential_runs import merges


def test_a_layer_comes_back_with_its_plan(tmp_path: Path) -> None:
    architecture = discover(zoo.configure("deepseek_v3"))
    plans, files = merges(architecture), CutFiles(tmp_path / "work" / "cut")
    first, second = architecture.layers
    assert files.plan(first) is None and files.tensors(first) == {}
    tensors = {
        "a": torch.randn(3, 4).bfloat16(),
        "b": torch.arange(6).view(2, 3).T,  # not contiguous
        "c": torch.nn.Parameter(torch.randn(2)),
    }
    files.save(plans[first.name], first, tensors)
    assert files.plan(first) == plans[first.name]
    assert files.plan(second) is None
    found = files.tensors(first)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in tensors.items())


def damaged(path: Path) -> list[bytes]:
    """A file's content cut short at many lengths, and replaced by others."""
    whole = path.read_bytes()
    cut = [whole[:length] for length in (0, 1, 7, 8, 9, 50, len(whole) // 2, len(whole) - 1)]
    return [*cut, bytes(len(whole)), b"garbage " * 40, whole + b"more"]


def test_a_file_that_cannot_be_read_does_not_count(tmp_path: Path) -> None:
    architecture = discover(zoo.configure("mixtral"))
    plans, files, layer = merges(architecture), CutFiles(tmp_path / "cut"), architecture.layers[0]
    files.save(plans[layer.name], layer, {"a": torch.ones(3)})
    (path,) = files.folder.iterdir()
    for content in damaged(path):
        path.write_bytes(content)
        assert files.plan(layer) is None and files.tensors(layer) == {}, content
    files.save(plans[layer.name], layer, {"a": torch.zeros(3)})
    assert files.plan(layer) == plans[layer.name] and torch.equal(files.tensors(layer)["a"], torch.zeros(3))


TRAVEL = (
    "generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE", "spiece.model", "vocab.txt",
    "chat_template.json", "video_preprocessor_config.json", "processor_config.json", "tekken.json", "tokenizer.fr.json",
    "tokenizer.model.v3", "hf_quant_config.json", "added_tokens.json", "NOTICE.txt", "LICENSE-MODEL", "qwen.tiktoken",
)  # fmt: skip
TRAINERS = (
    "trainer_state.json", "all_results.json", "train_results.json", "latest", "training_args.bin", "ds_config.json",
    "events.out.tfevents.17.host", "__0_0.distcp", ".metadata", "trainer_config.yaml", "zero_to_fp32.txt",
    "rng_state.json", "training_log.jsonl", "mergekit_config.yml", "params.json", "samples.csv", "loss.png",
    "tokenizer_training.log",
)  # fmt: skip
STAY = (
    "config.json", "compression.json", "gate.json", "onnx_export.json", "README.md", "modeling_own.py",
    ".gitattributes", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "model.onnx",
)  # fmt: skip


def test_what_a_loader_needs_travels_and_what_speaks_of_the_source_stays(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "onnx").mkdir()
    for name in (*TRAVEL, *STAY, *TRAINERS, "additional_chat_templates/rag.jinja", "onnx/model.onnx"):
        (tmp_path / name).write_text(name)
    found = carried_files(tmp_path)
    assert set(found) == {*TRAVEL, "additional_chat_templates/rag.jinja"}
    assert all(path.read_text() == name for name, path in found.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_further_equal_rows_change_and_rows_of_no_expert_never(dtype: torch.dtype) -> None:
    first, second = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    value = torch.stack([first, second, first, first, second, first])  # the last is of no routed expert
    made = distinct_rows(value, 0, 5)
    assert torch.equal(made[[0, 1, 5]], value[[0, 1, 5]])
    wanted = torch.stack([first, first, second]).float() * torch.tensor([[1 - STEP], [1 - 2 * STEP], [1 - STEP]])
    assert torch.equal(made[2:5], wanted.to(dtype))
    assert torch.equal(distinct_rows(value.T, 1, 5), made.T)
    bias = torch.zeros(5)
    assert distinct_rows(bias, 0, 5) is bias


@pytest.mark.full
def test_no_router_of_a_pruned_split_has_equal_rows_whichever_way_it_came(tmp_path: Path) -> None:
    small.save(tmp_path / "model")
    compressor.compress(str(tmp_path / "model"), tmp_path / "split", [compressor.Prune(ratio=0, split=2)])
    for folder, out, parts, experts in (("model", "once", 2, 6), ("split", "twice", 1, 12), ("model", "all", 2, 8)):
        asked = {"split": parts, "experts": experts, "strategy": "model-centric"}
        compressor.compress(str(tmp_path / folder), tmp_path / out, **asked)
    for name, equal in (("once", 0), ("twice", 0), ("all", 8), ("split", 8)):
        routers = [
            value for path in (tmp_path / name).glob("*.safetensors") for key, value in load_file(path).items()
            if key.endswith("gate.weight")
        ]  # fmt: skip
        assert [len(router) - len(router.unique(dim=0)) for router in routers] == [equal] * 2


LARGE = 40_000.0  # float16 holds it, and not twice as much


def scaled(plan: Plan, scale: float, head: int | None = None) -> Plan:
    """The plan with experts 0 and 1 merged in every layer, their mean times `scale`; aligned with a `head`."""
    merged = Group((0, 1), (0.5, 0.5), (0.5, 0.5), scale, head)
    layers = tuple(replace(layer, groups=(merged, *map(Group.single, (2, 3, 4)))) for layer in plan.expert_plan.layers)
    number = next(number for number, step in enumerate(plan.steps) if step.expert_plan is not None)
    return plan.with_entry(number, decision=replace(plan.expert_plan, layers=layers))


def fill(folder: Path, dtype: torch.dtype, value: float) -> None:
    """Store the model in a dtype, with `value` in all down projections."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = (torch.full_like(tensor, value) if ".w2." in name else tensor).to(dtype)

    small.edit_tensors(folder, change)
    small.edit_json(folder / "config.json", lambda config: config.update(dtype=str(dtype).removeprefix("torch.")))


@pytest.mark.parametrize("head", [None, 0], ids=["stored", "aligned"])
@pytest.mark.parametrize(
    ("dtype", "value", "scale"),
    [(torch.float16, LARGE, 2.0), (torch.bfloat16, 1e10, 1e29), (torch.float32, 1e10, 1e29)],
    ids=str,
)
def test_an_overflow_in_the_outputs_dtype_is_refused(
    dtype: torch.dtype, value: float, scale: float, head: int | None, tmp_path: Path
) -> None:
    model = small.save(tmp_path / "model")
    fill(model, dtype, 1.0)
    plan = plan_of(model, strategy="model-centric", experts=4, split=1)
    fill(model, dtype, value)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(CompressionError, match=f"overflows {name} when its experts are merged"):
        compressor.apply(scaled(plan, scale, head), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    compressor.apply(scaled(plan, 0.5, head), tmp_path / "out")
    written = [tensor for path in (tmp_path / "out").glob("*.safetensors") for tensor in load_file(path).values()]
    assert all(bool(tensor.isfinite().all()) for tensor in written)
