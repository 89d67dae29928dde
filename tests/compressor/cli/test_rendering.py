"""What the commands print of plans, models, pushes and exports: every figure, and names as they are written."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from compressor.checkpoint.reader import Size
from compressor.cli.compress import show_outcome
from compressor.cli.terminal import Bars
from compressor.document.terminal import show
from compressor.hub.push import PushedFile, PushSummary
from compressor.model.inspection import Inspection, Part, SmallerSize
from compressor.model.moe_layer import MoeLayer
from compressor.model.serving import Served, advise
from compressor.pipeline.outcome import Outcome
from compressor.recipe.plan import Group, LayerPlan, Source
from compressor.recipe.steps_plan import Plan
from compressor.report.inspection import inspection_blocks
from compressor.report.terminal import plan_blocks
from tests.support.doc_pages import parse
from tests.support.plans import Decided, by_hand

HOSTILE = "[bold red]m[/]\\[x] :smile: `<b>` | {y}"


@pytest.fixture(name="out")
def _out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "300")
    return lambda: capsys.readouterr().out


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in text.splitlines() if line.startswith("│")]


def a_plan(**others: Any) -> Plan:
    at, pair = "model.layers.0.mlp", Group((0, 1), (0.5, 0.5), (0.5, 0.5))
    layer = MoeLayer(f"{at}.experts", at, f"{at}.gate", "model.layers.0", 0, 20, 2, 1, 1)
    fields: dict[str, Any] = {"protected": {f"{at}.experts": (2,)}, **others}
    source = Source("folder", None, "f" * 64)
    layers = (LayerPlan.of(layer, [pair, Group.single(2)], decided_by="x"),)
    return by_hand(Decided(source, 2, "by-hand", {}, None, layers, **fields))


def test_a_plan_is_a_row_for_each_layer(out: Any) -> None:
    show((*plan_blocks(a_plan(), Path("a.json")), *plan_blocks(a_plan(protected={}), Path("b[1].json"))))
    text = out()
    first, second = cells(text)
    assert first == ["0", "20 → 2", "2", "0+1", "3-19", "2", "x"] and second == [*first[:5], "x"]
    assert "Plan by by-hand, written to b[1].json" in text
    assert text.count("1 protected expert, neither merged nor dropped") == 1


def test_an_outcome_tells_sizes_time_and_what_was_left_out(out: Any) -> None:
    names = tuple(f"{HOSTILE}.{number}" for number in range(6))
    made = Outcome(
        HOSTILE, a_plan(), 20, 2, Size(1000, 4000), Size(250, 1000), {"plan": 1.25, "write": 0.5}, 3_000_000,
        names, ("n_extra",), advise(Served("mixtral", 2, 2, 256), [2, 4]),
    )  # fmt: skip
    show_outcome(made, False)
    text = out()
    assert cells(text) == [
        ["experts per layer", "20", "2", ""], ["parameters", "1k", "250", "25.0%"], ["bytes", "4 kB", "1 kB", "25.0%"],
    ]  # fmt: skip
    lines = text.splitlines()
    assert "Time: plan 1.2 s, write 0.5 s; peak memory 3 MB" in lines and f"Written to {HOSTILE}" in lines
    assert "Compressed by by-hand" in text and "1 protected expert, neither merged nor dropped" in lines
    assert "Servers: at full speed in vLLM, SGLang, FlashInfer, aiter, llama.cpp" in lines
    left_out = f"6 tensors that stock transformers does not load: {' '.join(names)}"
    assert f"Left out of the output: {left_out}" in lines
    assert "Set to zero in the config: n_extra, as no multi-token-prediction head is stored" in lines
    show_outcome(replace(made, left_out=(), zeroed_fields=(), plan=a_plan(protected={})), False)
    text = out()
    assert "Left out" not in text and "protected" not in text


def test_a_run_ends_with_commands_that_make_sense_next(out: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a smaller model"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    made = Outcome(str(folder), a_plan(), 20, 2, Size(1000, 4000), Size(250, 1000), {}, 0)
    show_outcome(made, False)
    lines = out().partition("Next:\n")[2].splitlines()
    commands = [shlex.split(line) for line in lines]
    assert [words[:2] for words in commands] == [["moe-compress", name] for name in ("gate", "push")]
    values = [parse(words[1:]) for words in commands]  # the command line takes them as they stand
    assert values[0]["base"] == "folder" and values[0]["compressed"] == str(folder)
    assert str(values[1]["checkpoint"]) == str(folder)
    show_outcome(replace(made, pushed=pushed()), False)
    assert "moe-compress push" not in out()
    show_outcome(made, True)
    assert "Next" not in out()


def test_an_inspection_tells_every_figure(out: Any) -> None:
    report = Inspection(
        HOSTILE, None, "mixtral", "MixtralForCausalLM", 2, 3, 8, 2, "softmax", None, 2000, 8000,
        (Part("routed experts", 1500, 6000),), (SmallerSize(4, 1250, 5000),), 11, 12, 13, 14, 15, (f"{HOSTILE}.w",), (),
    )  # fmt: skip
    show(inspection_blocks(report))
    text = out()
    assert text.splitlines()[0].strip() == HOSTILE
    found = {row[0]: row[1:] for row in cells(text)}
    assert found["routed experts"] == ["1.5k", "6 kB", "75.0%"] and found["4"] == ["1.25k", "5 kB", "62.5%"]
    assert found["not loaded by stock transformers"] == [f"1 tensors, {HOSTILE}.w ..."]
    assert found["bytes written"] == ["15 B (4 experts)"] and found["quantization"] == ["none"]
    show(inspection_blocks(replace(report, loader_fault=HOSTILE)))
    assert ["stock loading", HOSTILE] in cells(out())
    show(inspection_blocks(replace(report, left_out=(), outcomes=())))
    text = out()
    assert "not loaded" not in text and ["bytes written", "-"] in cells(text)


def pushed(**others: Any) -> PushSummary:
    fields: dict[str, Any] = {
        "repo_id": "org/smaller", "url": "https://a.org/[x]", "branch": "main", "create_pr": False, "message": HOSTILE,
        "uploaded": (PushedFile(HOSTILE, 1234, "new"),), "uploaded_bytes": 1234, "tag": None,
        "left_out": (), "dry_run": False,
    }  # fmt: skip
    return PushSummary(**{**fields, **others})


def test_a_push_tells_what_went_where(out: Any) -> None:
    show(pushed().blocks())
    text = out()
    assert cells(text) == [[HOSTILE, "1.23 kB", "new"]] and "dry run" not in text
    told = [line for line in text.splitlines() if line[0] not in "┏┃┡│└"]
    assert told[1:] == [
        f"Commit: {HOSTILE}", "1 file, 1.23 kB went to main of org/smaller in one commit.", "https://a.org/[x]",
    ]  # fmt: skip
    more = {"removed": ("old",), "unchanged": ("a", "b"), "left_out": ("[c]",), "tag": "v1", "create_pr": True}
    show(pushed(dry_run=True, pull_request="https://a.org/pull", **more).blocks())
    text = out()
    assert ["old", "-", "removed"] in cells(text)
    for said in (
        "org/smaller (dry run: nothing is sent)", "would go to a pull request against main of org/smaller",
        "2 more are there already.", "Removed are parts", "no part of the model: [c]", "would be tagged v1.",
        "Pull request: https://a.org/pull",
    ):  # fmt: skip
        assert said in text
    show(pushed(uploaded=()).blocks())
    assert out() == "Nothing has changed: main of org/smaller has these files already.\nhttps://a.org/[x]\n"


def test_a_phase_within_another_has_a_bar_until_it_ends() -> None:
    bars = Bars(Progress())
    bars.start("correct", 2)
    bars.start("tune layer 0", 2)
    bars.advance("step")
    assert [task.description for task in bars.bars.tasks] == ["correct", "tune layer 0"]
    bars.advance("step")
    bars.advance("layer 0")
    assert [(task.description, task.completed) for task in bars.bars.tasks] == [("correct", 1)]
    bars.advance("layer 1")
    bars.advance("no more")
    bars.start("correct", 5)
    assert [(task.description, task.completed, task.total) for task in bars.bars.tasks] == [("correct", 0, 5)]
