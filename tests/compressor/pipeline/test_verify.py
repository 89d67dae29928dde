"""An output against its digests and its base: what is the base's, what steps changed, and what is damaged."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import compressor
from compressor import CompressionError
from compressor.checkpoint.reader import read_header
from compressor.pipeline.outcome import read_plan
from compressor.pipeline.verify import verify_against_base, verify_digests
from tests.support import small
from tests.support.command_line import Run, names, refused

PRUNE = compressor.Prune(strategy="aimer", experts=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("verify") / "base", "qwen3_moe", shard="40KB")


def made(base: Path, out: Path, *steps: Any) -> Path:
    text = small.text_file(base.parent)
    compressor.compress(str(base), out, steps, calibration=str(text), samples=16, sequence_length=32)
    return out


@pytest.fixture(scope="module")
def pruned(base: Path) -> Path:
    return made(base, base.parent / "pruned", PRUNE)


def flip(path: Path, position: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_one_flipped_bit_in_any_file_is_named(base: Path, pruned: Path, tmp_path: Path) -> None:
    assert verify_digests(pruned).digests and verify_digests(pruned).passed
    assert subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=pruned, check=False).returncode == 0
    for file in names(pruned):
        for position in (0, -2):
            shutil.copytree(pruned, tmp_path / "damaged", dirs_exist_ok=True)
            flip(tmp_path / "damaged" / file, position)
            (fault,) = verify_against_base(tmp_path / "damaged", str(base)).faults
            assert fault.startswith(file), (file, position, fault)
    shutil.copytree(pruned, tmp_path / "damaged", dirs_exist_ok=True)
    file = tmp_path / "damaged" / "model.safetensors"
    last = max(read_header(file).values(), key=lambda info: info.end).name
    flip(file, -1)
    assert verify_digests(file.parent).faults == (f"model.safetensors is not what was written, in tensor {last}",)
    file.unlink()
    assert verify_digests(file.parent).faults == ("model.safetensors is missing",)


def test_dropped_experts_leave_the_bases_bytes_and_refitted_ones_are_named(base: Path, pruned: Path) -> None:
    result = verify_against_base(pruned, str(base))
    tensors = small.tensors_of(pruned)
    assert (result.passed, result.same, result.changed) == (True, len(tensors), {})
    refitted = made(base, base.parent / "refitted", PRUNE.model_copy(update={"correct": compressor.Correct("ridge")}))
    result = verify_against_base(refitted, str(base))
    after = small.tensors_of(refitted)
    expected = {
        name: float(torch.linalg.norm(after[name] - value) / torch.linalg.norm(value))
        for name, value in tensors.items()
        if not torch.equal(after[name], value)
    }
    assert result.passed and expected and result.same == len(tensors) - len(expected)
    assert result.changed == pytest.approx(expected, rel=1e-4)


def test_a_change_that_no_step_explains_is_a_fault(base: Path, pruned: Path, tmp_path: Path) -> None:
    shutil.copytree(pruned, tmp_path / "out")
    (tmp_path / "out" / "SHA256SUMS").unlink()
    rows = "model.layers.1.mlp.gate.weight"
    small.edit_tensors(tmp_path / "out", lambda tensors: tensors.update({rows: tensors[rows].flip(0).contiguous()}))
    small.edit_json(tmp_path / "out" / "config.json", lambda config: config.update(router_aux_loss_coef=0.5))
    small.edit_json(tmp_path / "out" / "tokenizer_config.json", lambda config: config.update(odd=1))
    faults = verify_against_base(tmp_path / "out", str(base)).faults
    named = [re.split(" differs| is not|: its rows", fault)[0] for fault in faults]
    files = ["tokenizer_config.json", "config.json: router_aux_loss_coef"]
    assert named == ["model.layers.1.mlp.gate", f"model.safetensors: tensor {rows}", *files]
    other = small.save(tmp_path / "other", "qwen3_moe", num_hidden_layers=1)
    with pytest.raises(CompressionError, match=r"was not made from .+other: it was made from base"):
        verify_against_base(pruned, str(other))


@pytest.mark.full
@pytest.mark.parametrize(
    "steps",
    [
        (PRUNE.model_copy(update={"split": 2}), compressor.Distill(steps=2, tokens_per_step=64, sequence_length=32)),
        (compressor.Prune(strategy="hc-smoe", experts=4), compressor.Quantize("int4", group_size=8)),
        (compressor.Constants(experts=4),),
    ],
    ids=["split", "quantised", "constants"],
)
def test_other_outputs_pass(base: Path, tmp_path: Path, steps: tuple[Any, ...]) -> None:
    result = verify_against_base(made(base, tmp_path / "out", *steps), str(base))
    assert result.passed and result.same > 10
    assert all(change and change < 0.5 for change in result.changed.values())


def test_experts_of_a_foreign_model_are_found_by_its_routers_rows(base: Path, pruned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(pruned / name, folder)
    plan = read_plan(pruned).expert_plan
    kept = {layer.module: tuple(group.members[0] for group in layer.groups) for layer in plan.layers}
    result = verify_against_base(folder, str(base))
    assert (result.digests, result.passed) == (False, True)
    assert result.experts == kept
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight differs" in verify_against_base(folder, str(base)).faults[0]


def test_the_command_says_so_by_its_exit_status(run: Run, base: Path, pruned: Path, tmp_path: Path) -> None:
    good = run("check", pruned, "--base", base, "--json")
    assert good.status == 0 and json.loads(good.out)["passed"], good
    shutil.copytree(pruned, tmp_path / "damaged")
    flip(tmp_path / "damaged" / "config.json", 5)
    bad = run("check", tmp_path / "damaged", "--base", base)
    assert bad.status == 1 and "config.json is not what was written" in bad.out, bad
    refused(run("check", pruned, "--base", pruned), "was not made from")
