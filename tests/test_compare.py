import hashlib
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from compressor import entry_points
from tests.support import small, zoo
from tests.support.audit import Moment, fill_disk, happening
from tests.support.command_line import Run, captured, names, refused
from tests.support.plans import pruned
from tests.support.plugins import REAP, install

LENGTH, SAMPLES = 32, 24
SIZES = ("--samples", SAMPLES, "--sequence-length", LENGTH)
Rows = list[dict[str, Any]]


pytestmark = pytest.mark.usefixtures("offline")


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    small.save(folder / "model")
    write_lines(folder / "a.jsonl", [f"Document {n}: a quick fox jumps {n * 37} times over dogs." for n in range(60)])
    write_lines(folder / "b.jsonl", [f"{n} + {n * 7} = {n * 8}, said number {n} to {n * n}." for n in range(60)])
    write_lines(folder / "e.jsonl", [f"What {n} and {n * n * n} have in common is little." for n in range(20)])
    return folder


@pytest.fixture
def sources(home: Path) -> tuple[Any, ...]:
    return ("--calibration", f"{home / 'a.jsonl'}=0.5", "--calibration", f"{home / 'b.jsonl'}=0.5", *SIZES)


def packed(path: Path, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    """[n, L]: the shuffled documents' bytes, each document ended by </s>."""
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(seed).shuffle(texts)
    tokenizer = small.tokenizer()
    ids = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def stock_logits(folder: Path, rows: torch.Tensor) -> torch.Tensor:
    return zoo.logits(transformers.AutoModelForCausalLM.from_pretrained(folder), rows)[:, :-1].double()


def stock_loss(folder: Path, rows: torch.Tensor) -> float:
    return float(cross_entropy(stock_logits(folder, rows).flatten(0, 1), rows[:, 1:].flatten()))


def pick(rows: Rows, **wanted: Any) -> dict[str, Any]:
    (found,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return found


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def compared(home: Path) -> dict[str, Any]:
    """Two counts, three strategies, two sources with weights, a text of one's own to evaluate on."""
    result = captured(
        "compare", home / "model", "-o", home / "comparison", "--experts", "6,4", "--json",
        "--strategies", "auto,count-guided,model-centric:merge=max", "--heldout", home / "e.jsonl",
        "--calibration", f"{home / 'a.jsonl'}=0.5", "--calibration", f"{home / 'b.jsonl'}=0.5", *SIZES,
    )  # fmt: skip
    assert result.status == 0, result.err
    assert result.err == ""
    content: dict[str, Any] = json.loads(result.out)
    assert content == read(home / "comparison")
    return content


@pytest.mark.full
def test_every_promised_row_is_there(compared: dict[str, Any], home: Path) -> None:
    rows = [(row["name"], row["correction"], row["experts"], row["seed"]) for row in compared["rows"]]
    expected: list[Any] = [("base", "none", 8, None)]
    for count in (6, 4):
        ways = (("auto", "none"), ("auto", "tune"), ("count-guided", "none"), ("model-centric (merge=max)", "none"))
        expected += [(*way, count, None) for way in ways]
        expected += [(f"random (seed {seed})", "none", count, seed) for seed in range(3)]
    assert rows == expected
    row, tokens = compared["rows"][0], packed(home / "e.jsonl")  # of the stock model
    assert row["loss"] == pytest.approx(stock_loss(home / "model", tokens), rel=1e-5)
    assert row["kl"] == row["error"] == row["loss_increase"] == 0
    assert compared["evaluation"] == {"e": tokens.numel()}
    assert compared["model"] == "model" and str(home) not in json.dumps(compared)
    assert [entry["source"] for entry in compared["calibration"]["sources"]] == ["a.jsonl", "b.jsonl"]
    assert names(home / "comparison") == ["comparison.json", "comparison.md", "comparison.png"]
    assert str(home) not in (home / "comparison" / "comparison.md").read_text(encoding="utf-8")


def test_reserved_calibration_text_is_evaluated_on(home: Path, sources: Any, run: Run, tmp_path: Path) -> None:
    """Of each source what follows its calibration's sequences, and a corrected row is still what `compress` gives."""
    reserve = 8
    arguments = ("--experts", "4", "--strategies", "count-guided", "--correct", "ridge", "--random-seeds", 1)
    command = ("compare", home / "model", "-o", tmp_path / "found", *arguments, "--evaluation-samples", reserve)
    result = run(*command, *sources)
    assert result.status == 0 and "Written: " in result.out
    assert "count-guided + ridge" in result.out and "Loss by evaluation source" in result.out
    found, out = read(tmp_path / "found"), tmp_path / "out"
    compress = ("compress", home / "model", "-o", out, "--experts", 4, "--strategy", "count-guided")
    assert run(*compress, "--correct", "ridge", *sources).status == 0
    row, losses = pick(found["rows"], correction="ridge"), []
    stock = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert row["parameters"] == sum(value.numel() for value in stock.parameters())
    layers = pruned(json.loads((out / "compression.json").read_text())["plan"])["layers"]
    errors = [layer["figures"]["correction"]["heldout_error"] for layer in layers]
    assert row["error"] == pytest.approx(sum(errors) / len(errors))
    for name, entry in zip("ab", found["calibration"]["sources"], strict=True):
        rows, used = packed(home / f"{name}.jsonl"), SAMPLES // 2
        assert entry["sha256"] == hashlib.sha256(rows[:used].numpy().tobytes()).hexdigest()
        losses.append(stock_loss(out, rows[used : used + reserve // 2]))
        assert row["loss_by_source"][name] == pytest.approx(losses[-1], rel=1e-6)
        assert found["evaluation"][name] == reserve // 2 * LENGTH
        assert 0 < row["errors_by_source"]["loss"][name] < 1
    assert row["loss"] == pytest.approx(sum(losses) / 2, rel=1e-6)
    for name in ("kl", "flips"):
        assert row[name] == pytest.approx(sum(row[f"{name}_by_source"].values()) / 2)


@pytest.mark.full
def test_all_installed_strategies_are_compared_a_third_partys_too(
    home: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch, "their-reap", REAP)
    arguments = ("--experts", 4, "--correct", "none", "--random-seeds", 1, "--evaluation-samples", 2)
    data = ("--calibration", home / "a.jsonl", "--samples", 8, "--sequence-length", 32)
    result = run("compare", home / "model", "-o", tmp_path / "found", *arguments, *data)
    assert result.status == 0 and "their-reap" in result.out
    rows = read(tmp_path / "found")["rows"]
    found = [row["name"] for row in rows]
    measuring = [name for name in entry_points.names(entry_points.STRATEGIES) if name != "listed"]
    assert found == ["base", *measuring, "random (seed 0)"] and "their-reap" in found
    ours, theirs = pick(rows, name="reap"), pick(rows, name="their-reap")
    assert theirs["loss"] == pytest.approx(ours["loss"])


REFUSALS: list[tuple[list[Any], str]] = [
    (["--experts", "6,x"], r"experts\[2\] should be a whole number, it is 'x'"),
    (["--experts", "0"], "0 experts are fewer than the top-k of 2"),
    (["--experts", "6,9"], "9 experts asked for, it has 8"),
    (["--ratio", "0.5"], "say how many experts to keep by --experts or --ratio"),
    (["--ratio", "half"], r"ratios\[0\] should be a number, it is 'half'"),
    (["--split", "5"], "do not divide into 5 equal parts"),
    (["--top-k", "3"], "--top-k 3 is not between 1 and the 2 experts"),
    (["--strategies", "reep"], "no strategy 'reep'; did you mean 'reap'"),
    (["--strategies", "reap,reap"], "--strategies names one twice"),
    (["--strategies", "reap:x=1"], "'reap' has no option 'x'"),
    (["--strategies", "reap:x"], "strategy 'reap:x': 'x' should be option=value"),
    (["--strategies", "hope:balance=worst"], "'hope' keeps experts by no score, so balance=worst does not go with it"),
    (["--strategies", "reap:balance=best"], "balance should be 'sum' or 'worst', it is 'best'"),
    (["--strategies", ","], "',' names none; name some, or leave it out for the default"),
    (["--correct", "ridge,polish"], "correct: method should be 'auto', 'none', 'ridge' or 'tune', it is 'polish'"),
    (["--correct", ""], "'' names none; name some, or leave it out"),
    (["--heldout", "gone.txt"], "heldout file gone.txt does not exist"),
    (["--heldout", "x" * 300], "heldout data 'x+' is no file, .*; pass --heldout with"),
    (["--calibration", "gone.txt"], "calibration file gone.txt does not exist"),
    (["--evaluation-samples", 0], "evaluation_samples should be greater than or equal to 1, it is 0"),
]


@pytest.fixture(scope="module")
def unreadable(home: Path) -> Path:
    """The model with weights that are refused as soon as they are read."""
    folder = Path(shutil.copytree(home / "model", home / "unreadable"))
    small.edit_tensors(folder, lambda tensors: [value.fill_(math.nan) for value in tensors.values()])
    return folder


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_bad_arguments(arguments: Any, message: str, home: Path, unreadable: Path, run: Run, tmp_path: Path) -> None:
    data = [] if "--calibration" in arguments else ["--calibration", home / "a.jsonl"]
    command = ("compare", unreadable, "-o", tmp_path / "out", "--strategies", "reap", *SIZES, *data)
    refused(run(*command, "--experts", 4, *arguments), message)
    if "--ratio" in arguments:
        refused(run(*command), "say how many experts to keep by --experts or --ratio")
    assert names(tmp_path) == []


def test_only_a_comparison_is_overwritten(
    home: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    arguments = ("--experts", 4, "--strategies", "count-guided", "--random-seeds", 1, "--evaluation-samples", 2)
    command = ("compare", home / "model", *arguments, "--calibration", home / "a.jsonl", *SIZES)
    assert run(*command).status == 0  # into the folder `comparison`
    old = small.tree(tmp_path)
    refused(run(*command), "comparison exists already; name a new folder for the reports or pass --overwrite")
    refused(run(*command, "-o", "notes", "--overwrite"), "notes holds no comparison.json, so --overwrite will not")
    with happening(Moment("open", r"comparison\.png$"), fill_disk):
        refused(run(*command, "--seed", 1, "--overwrite"), "the disk of .* is full; free some space")
    assert small.tree(tmp_path) == old
    assert run(*command, "--seed", 1, "--overwrite").status == 0
    assert read(tmp_path / "comparison")["seed"] == 1


@pytest.mark.full
def test_splits_and_top_k_are_rows(home: Path, tmp_path: Path, run: Run, sources: tuple[Any, ...]) -> None:
    out, model = tmp_path / "out", home / "model"
    given = ("--strategies", "gated-mass", "--correct", "none", "--heldout", home / "e.jsonl", "--dtype", "float32")
    asked = ("compare", model, "--ratio", "0.25", "--split", "1,2", "--top-k", "2,1", *given, *sources, "-o", out)
    assert run(*asked, "--random-seeds", 1).status == 0
    content = json.loads((out / "comparison.json").read_text())
    rows = {(row["split"], row["top_k"]): row for row in content["rows"][1:] if row["strategy"] == "gated-mass"}
    assert [(*key, row["experts"]) for key, row in rows.items()] == [(1, 2, 6), (1, 1, 6), (2, 2, 12), (2, 1, 12)]
    assert "| active |" in (out / "comparison.md").read_text(encoding="utf-8")
    made = tmp_path / "made"
    asked = ("compress", model, "-o", made, "--experts", 6, "--split", 2, "--top-k", 1, "--correct", "ridge")
    # planned on the same seven eighths of the text; the uncorrected plan is the corrected one's
    assert run(*asked, "--strategy", "gated-mass", "--dtype", "float32", *sources).status == 0
    plan = json.loads((made / "compression.json").read_text())["plan"]
    plan["steps"][0]["options"]["correct"] = {"method": "none"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert run("apply", tmp_path / "plan.json", "--model", model, "-o", tmp_path / "plain").status == 0
    ids = packed(home / "e.jsonl")
    loss = cross_entropy(stock_logits(tmp_path / "plain", ids).flatten(0, 1), ids[:, 1:].flatten())
    assert rows[2, 1]["loss"] == pytest.approx(float(loss), abs=1e-5)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    experts = [value.numel() for name, value in stock.named_parameters() if ".experts." in name]
    everything = sum(value.numel() for value in stock.parameters())
    assert rows[2, 1]["active"] == everything - sum(experts) * 11 // 12
