"""Plans from the files of other tools, each written here as that tool writes it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compressor.recipe.steps_plan import Plan
from tests.support import small
from tests.support.command_line import Run, refused, succeeded

KEPT = {0: [1, 3, 4, 6], 1: [0, 2, 5, 7]}


def razor(path: Path) -> None:
    tagged = {f"main_{layer}": {"keep": experts} for layer, experts in KEPT.items()}
    path.write_text(json.dumps({**tagged, "mtp_0": [0, 1, 2, 3]}))


def ascend(path: Path) -> None:
    path.write_text("".join(json.dumps({str(layer): experts[::-1]}) + "\n" for layer, experts in KEPT.items()))


def reap(path: Path) -> None:
    saliency = {layer: torch.zeros(8).index_fill(0, torch.tensor(experts), 1) for layer, experts in KEPT.items()}
    torch.save({layer: {"reap": value, "total_tokens": torch.tensor(9)} for layer, value in saliency.items()}, path)


@pytest.mark.parametrize(
    ("write", "name"), [(razor, "kept_expert_indices.json"), (ascend, "experts.jsonl"), (reap, "observations.pt")]
)
def test_the_experts_of_a_list_stay(write: Callable[[Path], None], name: str, run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model", "qwen3_moe")
    write(tmp_path / name)
    number = () if name != "observations.pt" else ("--experts", 4)
    succeeded(run("plan", model, "-o", tmp_path / "plan.json", "--from", tmp_path / name, *number))
    plan = Plan.load(tmp_path / "plan.json").expert_plan
    assert {layer.layer: [group.members[0] for group in layer.groups] for layer in plan.layers} == KEPT
    succeeded(run("apply", tmp_path / "plan.json", "-o", tmp_path / "out"))
    before, after = small.tensors_of(model), small.tensors_of(tmp_path / "out")
    for layer, kept in KEPT.items():
        rows = f"model.layers.{layer}.mlp.gate.weight"
        assert torch.equal(after[rows], before[rows][kept])


def test_files_that_are_no_lists_are_refused(run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model", "qwen3_moe")
    bad = {
        "text.json": (lambda path: path.write_text("{"), "text.json is not valid JSON"),
        "none.json": (lambda path: path.write_text("{}"), "none.json lists no experts"),
        "uneven.json": (
            lambda path: path.write_text('{"0": [1, 2, 4], "1": [1, 6]}'),
            "keeps 2 to 3 experts.*--experts N.*constants",
        ),
        "other.json": (lambda path: path.write_text('{"0": [1, 2, 9]}'), "list for layer 0 is .*, and 3 of 8 experts"),
        "noise.pt": (lambda path: path.write_bytes(b"noise"), "noise.pt holds no observations of REAP"),
        "scores.pt": (reap, "scores.pt scores all experts; say how many"),
    }
    for name, (write, message) in bad.items():
        write(tmp_path / name)
        refused(run("plan", model, "-o", tmp_path / "plan.json", "--from", tmp_path / name), message)
        assert not (tmp_path / "plan.json").exists()
