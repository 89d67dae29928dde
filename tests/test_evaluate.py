"""`evaluate` and the gate's conditions on models that end by themselves, copies of them, and planted loopers."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tests.support import small
from tests.support.command_line import Run, refused

END = 2
ENOUGH = 299  # answers that show a rise of no more than 0.01 with confidence 0.95: 0.99^299 < 0.05 < 0.99^298


def ending(chance: float) -> Any:
    """What makes a random model end at every token with about that chance: one hidden feature is always large."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][:, 0] = 8.0
        head = tensors["lm_head.weight"]
        head[:, 0] = 0.0
        head[END] = 0.0
        feature = float(head.shape[1]) ** 0.5 * 0.97  # of the normalised hidden state
        head[END, 0] = float(torch.tensor(chance * head.shape[0]).log()) / feature

    return change


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends, a bit-identical copy of it, and one whose end token is damped."""
    place = tmp_path_factory.mktemp("behaviour")
    small.edit_tensors(small.save(place / "base"), ending(0.6))
    for name in ("copy", "looper"):
        shutil.copytree(place / "base", place / name, copy_function=shutil.copyfile)  # with a time of its own
    small.edit_tensors(place / "looper", lambda tensors: tensors["lm_head.weight"][END].fill_(-1.0))
    (place / "prompts.txt").write_text("".join(f"Question {number}:\n" for number in range(ENOUGH)))
    return place


def asking(models: Path, *more: Any) -> list[Any]:
    files = ("--prompts", models / "prompts.txt", "--cache-dir", models / "cache")
    return [*files, "--max-new-tokens", 24, "--batch-size", 128, *more]


def test_a_bit_identical_copy_passes_at_the_documented_size(run: Run, models: Path, tmp_path: Path) -> None:
    asked = asking(models, "--max-loop-rise", 0.01, "--temperature", 1, "-o", tmp_path / "gate")
    result = run("gate", models / "base", models / "copy", *asked)
    assert result.status == 0, result.err
    assert "the rise of missed ends is at most 0.01 and the relative change of length is at most 0.1." in result.out
    content = json.loads((tmp_path / "gate" / "gate.json").read_text())
    conditions = ["rise of loops", "rise of missed ends", "relative change of length"]
    assert [each["name"] for each in content["conditions"]] == conditions
    assert content["tasks"] == [] and {each["verdict"] for each in content["conditions"]} == {"pass"}
    cases = ElementTree.parse(tmp_path / "gate" / "gate.xml").getroot().iter("testcase")
    assert [case.get("name") for case in cases] == conditions
    assert "| rise of loops |" in (tmp_path / "gate" / "gate.md").read_text()


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_planted_looper_fails(temperature: float, run: Run, models: Path) -> None:
    asked = asking(models, "--max-loop-rise", 0.01, "--temperature", temperature)
    result = run("gate", models / "base", models / "looper", *asked, "--json")
    assert result.status == 1, result.err
    loops, missed, length = json.loads(result.out)["conditions"]
    assert (length["compressed"], length["verdict"]) == (pytest.approx(24), "fail")  # of a base whose answers are short
    assert length["observed"] == pytest.approx(length["compressed"] / length["base"] - 1)
    assert (missed["base"] < 0.05, missed["compressed"], missed["verdict"]) == (True, 1.0, "fail")
    if temperature == 0:  # the most probable token, over and over
        assert loops["verdict"] == "fail" and loops["base"] == 0


def test_a_gate_that_no_copy_could_pass_is_refused(run: Run, models: Path) -> None:
    asked = asking(models, "--max-loop-rise", 0.01, "--limit", ENOUGH - 1)
    refused(run("gate", models / "base", models / "copy", *asked), "at least 299 answers")
    dry = run("gate", *asked, "--dry-run")
    assert dry.status == 2 and "at least 299 answers" in dry.err and "rise" not in dry.err.partition("Error")[0]
    refused(run("gate", models / "base", models / "copy", "--max-loop-rise", 0.01), "judge answers .*; name --prompts")
    refused(run("gate", "a", "b", "--max-length-change", 0.2, "--text", "t"), "--max-length-change judge answers")


def test_a_base_whose_answers_are_all_cut_off_shows_no_ends(run: Run, models: Path) -> None:
    asked = [*asking(models, "--limit", 20, "--max-loop-rise", 0.2)]
    result = run("gate", models / "looper", models / "base", *asked)
    assert result.status == 2 and "20 of 20 answers of looper do not end within 24 tokens" in result.err
    shorter = run("gate", models / "looper", models / "base", *asked, "--max-missed-rise", 1, "--json")
    loops, length = json.loads(shorter.out)["conditions"]
    assert (shorter.status, loops["verdict"], length["verdict"]) == (1, "pass", "fail") and length["upper"] < -0.5
    asked += ["--max-missed-rise", 1, "--max-length-change", 2]
    assert run("gate", models / "looper", models / "base", *asked).status == 0


def test_evaluate_writes_what_differs(run: Run, models: Path, tmp_path: Path) -> None:
    asked = asking(models, "--limit", 12, "-o", tmp_path / "out")
    result = run("evaluate", models / "base", models / "looper", *asked)
    assert result.status == 0 and "looper loops in" in result.out, result.err
    assert "12 answers of each model can show, with confidence 95%" in result.out
    content = json.loads((tmp_path / "out" / "behaviour.json").read_text())
    rates = {rate["measure"]: rate for rate in content["written"]["rates"]}
    assert (rates["missed ends"]["more"], rates["tokens"]["smaller"]) == (12, 24)
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert str(models) not in (tmp_path / "out" / "answers.jsonl").read_text()
    assert len(lines) == 12 and {line["base"]["ended"] for line in lines} == {"end"}
    page = (tmp_path / "out" / "answers.html").read_text()
    assert page.count("<article") == 12 and '<mark class="loop">' in page and "<script" not in page
    hidden = set(re.findall(r"article:not\(\.(choice-\d-\d+)\)", page))
    assert hidden == set(re.findall(r'id="(choice-\d-\d+)"', page))
    assert hidden == set(" ".join(re.findall(r'<article class="([^"]*)"', page)).split())


def test_answers_are_written_once(run: Run, models: Path, tmp_path: Path) -> None:
    asked = [*asking(models, "--limit", 3), "--cache-dir", tmp_path / "cache"]
    assert run("evaluate", models / "base", models / "copy", *asked).status == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    assert run("evaluate", models / "base", models / "copy", *asked).status == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == first and len(first) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing is asked; name --prompts"),
        (("--prompts", "none.jsonl"), "prompts file none.jsonl does not exist"),
        (("--prompts", "{prompts}", "--seeds", 3), "--seeds has no effect without sampling"),
        (("--prompts", "{prompts}", "--top-p", 0.9), "--top-p and --top-k have no effect"),
        (("--prompts", "{prompts}", "--chat"), "has no chat template"),
        (("--prompts", "{prompts}="), "lacks a source or a domain"),
        (("--prompts", "{prompts}", "--max-new-tokens", 10**6), "goes beyond the"),
        (("--prompts", "{prompts}", "--confidence", 2), "--confidence 2.0 should lie between"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: tuple[Any, ...], message: str, run: Run, models: Path) -> None:
    named = [str(option).format(prompts=models / "prompts.txt") for option in options]
    refused(run("evaluate", models / "base", models / "copy", *named), message)
