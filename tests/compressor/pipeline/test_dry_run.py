"""`--dry-run` against what the run really leaves, with no weight read and nothing written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.pipeline.dry_run import EVALUATION
from tests.support import small, zoo
from tests.support.command_line import Run


def sizes(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    weights = small.tensors_of(folder)
    of_layer = [value for name, value in weights.items() if ".layers.0.block_sparse_moe." in name]
    return {
        "num_experts": config["num_local_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "width": config["intermediate_size"],
        "layer_parameters": sum(value.numel() for value in of_layer),
        "layer_bytes": sum(value.nbytes for value in of_layer),
        "parameters": sum(value.numel() for value in weights.values()),
        "bytes": sum(value.nbytes for value in weights.values()),
    }


RECIPE = """
model: {model}
calibration: {{data: [{text}], samples: 8, sequence_length: 32}}
steps:
  - prune: {{experts: 6, strategy: gated-mass}}
  - routers: {{sequences: 16, rounds: 2, sequence_length: 16}}
  - prune: {{ratio: 0.25, strategy: gated-mass}}
"""
WAYS: dict[str, tuple[Any, ...]] = {
    "auto": ("--experts", 4, "--set", "prune.correct.steps=2", "--prune.correct.tokens", 32),
    "whole": ("--experts", 4, "--split", 1, "--correct", "none"),
    "ratio": ("--ratio", 0.25, "--strategy", "gated-mass", "--top-k", 1),
    "recipe": (),
}


@pytest.mark.full
@pytest.mark.parametrize("way", [way if way == "recipe" else zoo.full(way) for way in WAYS])
def test_a_run_leaves_the_shapes_that_were_shown(way: str, tmp_path: Path, run: Run) -> None:
    model, text = small.save(tmp_path / "model", intermediate_size=512), small.text_file(tmp_path)
    asked = (model, *WAYS[way], "--calibration", text, "--samples", 8, "--sequence-length", 32)
    if way == "recipe":
        (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=model, text=text))
        asked = (tmp_path / "recipe.yaml",)
    before, away = sorted(tmp_path.rglob("*")), shutil.copytree(model, tmp_path / "away")
    small.edit_tensors(model, lambda tensors: [value.fill_(torch.nan) for value in tensors.values()])  # never read
    shown = run("compress", *asked, "--dry-run")
    told = run("compress", *asked, "-o", tmp_path / "out", "--dry-run", "--json")
    assert (shown.status, told.status) == (0, 0) and "nothing is written" in shown.out
    shutil.rmtree(model)
    away.rename(model)
    assert sorted(tmp_path.rglob("*")) == before
    done, content = run("compress", *asked, "-o", tmp_path / "out", "--json"), json.loads(told.out)
    assert content["before"] == sizes(model)
    assert content["after"] == sizes(tmp_path / "out")
    assert done.status == 0
    plan = json.loads((tmp_path / "out" / "compression.json").read_text())["plan"]
    assert [step["name"] for step in content["steps"]] == [step["name"] for step in plan["steps"]]
    (read,) = content["texts"]
    assert read["samples"] * read["sequence_length"] == 256
    if way == "recipe":
        assert read["parts"] == [["routers", 16, 16], ["held out", 48, 16], [EVALUATION, 48, 16]]
        assert content["steps"][1]["passes"] == 2
    if way == "auto":
        assert content["servers"] == json.loads(done.out)["servers"]
    tokens = 48 * (16 if way == "recipe" else 32)  # of the evaluation, and of auto's six times 256
    assert content["activations"] == tokens * 32 * 4  # hidden size 32, float32


@pytest.mark.parametrize(("sampled", "tokens"), [("100", 100), ("all", 256)])
def test_sampled_tokens_count_as_memory_and_are_recorded(sampled: str, tokens: int, tmp_path: Path, run: Run) -> None:
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    asked = (
        "--experts",
        6,
        "--strategy",
        "enumerate",
        "--set",
        f"prune.sample_tokens={sampled}",
        "--calibration",
        text,
    )
    asked = (model, *asked, "--samples", 8, "--sequence-length", 32)
    content = json.loads(run("compress", *asked, "--dry-run", "--json").out)
    assert content["samples"] == tokens * 8 * 32 * 4  # experts, hidden size, float32
    assert content["memory"] == content["layers_memory"] + content["activations"] + content["samples"]
    assert run("plan", *asked, "-o", tmp_path / "plan.json").status == 0
    (step,) = json.loads((tmp_path / "plan.json").read_text())["steps"]
    assert str(step["options"]["sample_tokens"]) == sampled


def test_what_a_run_refuses_is_refused(tmp_path: Path, run: Run) -> None:
    model = small.save(tmp_path / "model")
    for asked, fault in (
        (("--experts", 1), "1 experts are fewer than the top-k of 2"),
        (("--experts", 4, "--split", 5), "do not divide into 5 equal parts"),
        (("--experts", 4, "--format", "absent"), "absent"),
    ):
        shown = run("compress", model, *asked, "--dry-run")
        assert shown.status == 2 and fault in shown.err.splitlines()[-1]
    assert "Missing option '--output' / '-o'" in run("compress", model, "--experts", 4).err


def test_the_gate_says_what_it_can_show(tmp_path: Path, run: Run) -> None:
    model = small.save(tmp_path / "model")
    asked = ("compress", model, "--experts", 4, "--gate", "moe_demo_facts", "--dry-run", "--json")
    shown = run(*asked, "--max-drop", 0.05)
    assert shown.status == 0, shown.err
    (task,) = json.loads(shown.out)["gate"]["tasks"]
    assert task["task"] == "moe_demo_facts" and task["items"] > 59  # of which 0.95^59 is below 5%
    refused = run(*asked, "--max-drop", 0.0001)
    assert refused.status == 2 and "could not even pass an identical model" in refused.err
