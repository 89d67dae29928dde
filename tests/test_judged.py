"""`evaluate` and the gate on text by domain and on the base's answers, with a domain that a calibration left out."""

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from compressor.hub.card import card_text
from compressor.model.opened import load_whole
from compressor.model.tokenizer import load_tokenizer
from tests import small
from tests.command_line import Run, captured, refused

END = 2
LETTERS = "".join(
    f"the {'quick brown fox jumps over lazy dogs'[n % 20 : n % 20 + 9]} again and so on\n\n" for n in range(200)
)
DIGITS = "".join(f"{n * 7919 % 100_003} {n * 104_729 % 1_299_709} {n} {n * n}\n\n" for n in range(200))
SIZES = ["--text-samples", 16, "--text-length", 64]


def split_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Send digits to the last four experts and all else to the first four: one large feature tells them apart."""
    sign = torch.ones(small.VOCABULARY)
    sign[small.tokenizer()("0123456789", add_special_tokens=False)["input_ids"]] = -1.0
    for name, value in tensors.items():
        if name.endswith("embed_tokens.weight"):
            value[:, 0] = 12.0 * sign
        elif "gate.weight" in name:
            value[:, 0] = torch.tensor([2.0] * 4 + [-2.0] * 4)
        elif name.endswith(("o_proj.weight", "w2.weight")):
            value[0] = 0.0  # nothing else writes it


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a copy, half of it calibrated on letters alone, and text of both domains."""
    place = tmp_path_factory.mktemp("judged")
    small.edit_tensors(small.save(place / "base"), split_experts)
    shutil.copytree(place / "base", place / "copy", copy_function=shutil.copyfile)
    (place / "letters.txt").write_text(LETTERS)
    (place / "digits.txt").write_text(DIGITS)
    made = captured(*compressing(place, place / "half", "letters.txt"))
    assert made.status == 0, made.err
    return place


def compressing(models: Path, out: Path, *texts: str) -> list[Any]:
    text = [part for name in texts for part in ("--calibration", models / name)]
    sizes = ["--samples", 16, "--sequence-length", 64]
    return [
        "compress",
        models / "base",
        "-o",
        out,
        "--experts",
        4,
        "--strategy",
        "reap",
        "--correct",
        "none",
        *text,
        *sizes,
    ]


def reading(models: Path) -> list[Any]:
    return ["--text", f"{models / 'letters.txt'}=prose", "--text", f"{models / 'digits.txt'}=numbers", *SIZES]


def test_a_domain_that_the_calibration_left_out_is_named(run: Run, models: Path, tmp_path: Path) -> None:
    result = run("evaluate", models / "base", models / "half", *reading(models), "-o", tmp_path / "out")
    assert result.status == 0, result.err
    assert "The domain numbers suffers: its" in result.out and "domain prose suffers" not in result.out
    content = json.loads((tmp_path / "out" / "behaviour.json").read_text())
    prose, numbers = content["text"]["domains"]
    assert [prose["domain"], numbers["domain"]] == ["prose", "numbers"]
    assert prose["kl"]["change"] < 1e-9 and prose["flips"]["change"] == 0  # no other expert was ever used
    assert numbers["kl"]["lower"] > 0.001 and numbers["sequences"] == 16 and numbers["tokens"] == 16 * 63
    assert [each["domain"] for each in content["text"]["suffering"]] == ["numbers"]
    assert content["written"] is None and content["answers"] is None
    page = (tmp_path / "out" / "behaviour.md").read_text()
    assert "The domain numbers suffers" in page and "| prose |" in page


def test_the_gate_fails_by_the_name_of_the_domain(run: Run, models: Path, tmp_path: Path) -> None:
    limits = ["--max-flips", 0.02, "--max-loss-rise", 0.05]
    result = run("gate", models / "base", models / "half", *reading(models), *limits, "-o", tmp_path / "gate")
    assert result.status == 1, result.err
    assert (
        "the share of flips on numbers is more than 0.02" in result.out and "The domain numbers suffers" in result.out
    )
    content = json.loads((tmp_path / "gate" / "gate.json").read_text())
    verdicts = {each["name"]: each["verdict"] for each in content["conditions"]}
    assert verdicts.keys() == {
        f"{what} on {of}" for what in ("share of flips", "rise of the loss") for of in ("prose", "numbers")
    }
    assert (verdicts["share of flips on prose"], verdicts["rise of the loss on prose"]) == ("pass", "pass")
    assert verdicts["share of flips on numbers"] == "fail" and content["tasks"] == []
    failures = ElementTree.parse(tmp_path / "gate" / "gate.xml").getroot().iter("failure")
    assert any("share of flips on numbers" in str(each.get("message")) for each in failures)


def test_a_copy_passes_by_domain(run: Run, models: Path) -> None:
    result = run(
        "gate", models / "base", models / "copy", *reading(models), "--max-flips", 0.01, "--max-loss-rise", 0.01
    )
    assert result.status == 0, result.err
    assert "suffers" not in result.out and "is at most 0.01" in result.out


def test_compress_puts_in_place_only_what_passes_by_domain(run: Run, models: Path, tmp_path: Path) -> None:
    gate = [*reading(models), "--max-flips", 0.02]
    result = run(*compressing(models, tmp_path / "out", "letters.txt"), *gate)
    assert result.status == 1, result.err
    assert not (tmp_path / "out").exists() and "The domain numbers suffers" in result.out
    kept = run(*compressing(models, tmp_path / "kept", "letters.txt"), *gate, "--keep-failed")
    assert kept.status == 1 and (tmp_path / "kept" / "gate.json").is_file()
    recipe = (tmp_path / "kept" / "recipe.yaml").read_text()
    assert "letters.txt=prose" in recipe and "max_flips: 0.02" in recipe and str(models) not in recipe
    report = run("report", tmp_path / "kept", "-o", tmp_path / "report.html")
    assert report.status == 0, report.err
    assert "The domain numbers suffers" in (tmp_path / "report.html").read_text()


def test_answers_are_read_with_the_probabilities_of_their_ends(run: Run, models: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"word {n}", "answer": f"{n} and more"} for n in range(12)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--answers", f"{tmp_path / 'answers.jsonl'}=made"]
    result = run("evaluate", models / "base", models / "half", *given, "--json")
    assert result.status == 0, result.err
    content = json.loads(result.out)
    (row,) = content["answers"]["domains"]
    assert row["domain"] == "made" and row["sequences"] == 12 and len(content["each"]) == 12
    assert row["marks"][0]["name"] == "the answer" and row["marks"][0]["count"] == 12
    tokenizer = load_tokenizer(models / "base")
    ends = []
    for folder in ("base", "half"):
        stock, found = load_whole(models / folder, dtype="float32"), []
        for each in rows:
            ids = [
                *tokenizer(each["prompt"])["input_ids"],
                *tokenizer(each["answer"], add_special_tokens=False)["input_ids"],
            ]
            with torch.no_grad():
                found.append(float(stock(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)[END]))
        ends.append(sum(found) / len(found))
    here = row["marks"][0]["here"]
    assert [here["base"], here["compressed"]] == pytest.approx(ends, rel=1e-4)
    assert run("gate", models / "base", models / "copy", *given, "--max-flips", 0.05).status == 0


def test_prompts_may_be_answered_by_the_base_alone(run: Run, models: Path, tmp_path: Path) -> None:
    (models / "prompts.txt").write_text("".join(f"Question {number}:\n" for number in range(10)))
    asked = ["--prompts", models / "prompts.txt", "--max-new-tokens", 12, "--cache-dir", tmp_path / "cache", "--json"]
    forced = run("evaluate", models / "base", models / "half", *asked, "--teacher-forced")
    both = run("evaluate", models / "base", models / "half", *asked)
    assert forced.status == both.status == 0, forced.err + both.err
    one, other = json.loads(forced.out), json.loads(both.out)
    assert one["written"] is None and other["written"]["prompts"] == 10
    assert one["answers"] == other["answers"] and one["each"] == other["each"] and len(one["each"]) == 10
    gate = run("gate", models / "base", models / "half", *asked, "--teacher-forced", "--max-flips", 0.5)
    assert gate.status == 0, gate.err
    assert [each["name"] for each in json.loads(gate.out)["conditions"]] == ["share of flips on answers of prompts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gate", "--text", "letters.txt"], "judged by --max-flips or --max-loss-rise"),
        (["gate", "--tasks", "moe_demo_facts", "--max-flips", 0.1], "judged by --max-flips or --max-loss-rise"),
        (["gate", "--text", "letters.txt", "--max-flips", 0], "max_flips"),
        (["evaluate", "--text", "missing.txt"], "text file missing.txt does not exist"),
        (["evaluate", "--text", "short.txt=few"], r"--text short.txt gives \d+ tokens, too few to tell a difference"),
        (
            ["evaluate", "--text", "letters.txt", "--text-samples", 7],
            "--text-samples 8 and --text-length 16 at the least",
        ),
        (["evaluate", "--answers", "empty.jsonl"], "--answers empty.jsonl has no answers"),
        (["evaluate", "--teacher-forced"], "name --prompts, or give --answers"),
        (["evaluate"], "nothing is asked; name --prompts"),
    ],
)
def test_what_cannot_be_judged_is_said_in_a_sentence(
    arguments: list[Any], message: str, run: Run, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    (models / "short.txt").write_text("too short")
    (models / "empty.jsonl").write_text("\n")
    command, *rest = arguments
    refused(run(command, "base", "half", *rest), message)


def test_a_run_on_several_sources_names_the_one_that_suffers(run: Run, models: Path, tmp_path: Path) -> None:
    """Held-out text of each source is compared with the base after a step that holds some out."""
    sources = [f"{models / 'letters.txt'}=0.8", f"{models / 'digits.txt'}=0.2"]
    arguments = compressing(models, tmp_path / "out", *sources)
    arguments[arguments.index("none")], arguments[arguments.index("reap")] = "ridge", "count-guided"
    arguments[arguments.index("--samples") + 1] = 100
    result = run(*arguments)
    assert result.status == 0, result.err
    assert "Held-out text by source" in result.out and "The domain digits suffers" in result.out
    report = run("report", tmp_path / "out", "-o", tmp_path / "report.html")
    assert report.status == 0, report.err
    assert "The domain digits suffers" in (tmp_path / "report.html").read_text()
    card = card_text(tmp_path / "out", "owner/name").text
    assert "The domain digits suffers" in card and "Held-out text by source" in card
    again = run(*arguments, "--json")
    heldout = json.loads(again.out)["heldout"]
    assert [each["domain"] for each in heldout["domains"]] == ["letters", "digits"]
    assert [each["domain"] for each in heldout["suffering"]] == ["digits"]
