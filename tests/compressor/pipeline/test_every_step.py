"""A small Mixtral and a small Qwen3-MoE through every stage, from a split to the Hub."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import compressor
from tests.support import small, zoo
from tests.support.command_line import Run, names, refused
from tests.support.hub_pushes import REPOSITORY, logged_in


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_every_stage(name: str, run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model", name, num_hidden_layers=1, max_position_embeddings=512)
    text, out = small.text_file(tmp_path), tmp_path / "out"
    steps = [
        compressor.Prune(strategy="reap", ratio=0.25, split=2, correct="ridge"),
        compressor.Routers(rounds=1, sequences=8, sequence_length=32),
        compressor.Distill(steps=2, tokens_per_step=64, sequence_length=32),
    ]
    made = compressor.compress(
        str(model), out, steps, calibration=str(text), samples=16, sequence_length=32, dtype="float32"
    )
    done = json.loads((out / "compression.json").read_text())["plan"]["steps"]
    assert [step["name"] for step in done] == ["prune", "routers", "distill"]
    assert done[2]["result"]["before"] == done[1]["result"]["after"]  # of the same held-out text
    stock = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert {module.num_experts for module in zoo.experts(stock).values()} == {12} == {made.experts_after}
    assert zoo.logits(stock, torch.arange(3, 19)[None]).isfinite().all()
    assert run("compress", out / "recipe.yaml", "-o", tmp_path / "again").status == 0
    (tmp_path / "plan.json").write_text(made.plan.to_json())
    assert run("apply", tmp_path / "plan.json", "-o", tmp_path / "applied").status == 0
    assert small.tree(tmp_path / "again") == small.tree(tmp_path / "applied") == small.tree(out)

    few = ("--tasks", "moe_demo_sorting", "--limit", 4, "--inconclusive", "pass")
    gate = run("gate", model, out, *few, "-o", tmp_path / "gate")
    assert gate.status in (0, 1) and "gate.json" in names(tmp_path / "gate"), gate
    verdict = json.loads((tmp_path / "gate" / "gate.json").read_text())["verdict"]
    assert run("report", out, "-o", tmp_path / "report.html", "--no-measure").status == 0
    page = (tmp_path / "report.html").read_text()
    assert verdict in page and "so nothing is known of its accuracy" not in page
    graph = run("export", out, "-o", tmp_path / "graph", "--json")
    assert graph.status == 0 and {route["route"] for route in json.loads(graph.out)["routes"]} == {"MoE"}, graph
    with logged_in() as hub:
        refused(run("push", out, REPOSITORY), "--yes")
        assert run("push", out, REPOSITORY, "--yes").status == 0
        there = hub.repositories[REPOSITORY].files()
    assert verdict in there["README.md"].decode()
    assert there["model.safetensors"] == (out / "model.safetensors").read_bytes() and "README.md" in there

    sizes = ("--experts", 4, "--calibration", text, "--samples", 16, "--sequence-length", 32)
    constants = run("compress", model, "-o", tmp_path / "constants", "--format", "mone", *sizes)
    assert constants.status == 0, constants
    assert load_file(tmp_path / "constants" / "model.safetensors")
