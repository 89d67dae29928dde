import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from scipy.stats import t as student
from torch.nn.functional import cross_entropy, log_softmax
from transformers import AutoModelForCausalLM

from compressor import compress
from compressor.hub.card import card_text
from compressor.model.opened import load_whole
from compressor.model.tokenizer import load_tokenizer
from compressor.recipe.recipe import default_steps
from compressor.records import read_as
from compressor.steps.distill.training import Evaluation, TrainingState
from tests.support import small
from tests.support.command_line import Run, captured, refused, succeeded

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
    place = tmp_path_factory.mktemp("judged")
    small.edit_tensors(small.save(place / "base"), split_experts)
    shutil.copytree(place / "base", place / "copy", copy_function=shutil.copyfile)
    (place / "letters.txt").write_text(LETTERS)
    (place / "digits.txt").write_text(DIGITS)
    succeeded(captured(*compressing(place, place / "half", "letters.txt")))
    return place


def compressing(
    models: Path, out: Path, *texts: Path | str, experts: int = 4, correct: str = "none", strategy: str = "reap"
) -> list[Any]:
    text = [part for name in texts for part in ("--calibration", models / name)]
    ways = ["--experts", experts, "--strategy", strategy, "--correct", correct]
    return ["compress", models / "base", "-o", out, *ways, *text, "--samples", 16, "--sequence-length", 64]


def reading(models: Path) -> list[Any]:
    return ["--text", f"{models / 'letters.txt'}=prose", "--text", f"{models / 'digits.txt'}=numbers", *SIZES]


def test_a_domain_that_the_calibration_left_out_is_named(run: Run, models: Path, tmp_path: Path) -> None:
    result = succeeded(run("evaluate", models / "base", models / "half", *reading(models), "-o", tmp_path / "out"))
    assert "The domain numbers is degraded: its" in result.out and "domain prose is degraded" not in result.out
    content = json.loads((tmp_path / "out" / "behaviour.json").read_text())
    numbers, prose = content["text"]["domains"]  # the worst first
    assert [prose["domain"], numbers["domain"]] == ["prose", "numbers"]
    assert prose["kl"]["change"] < 1e-9 and prose["flips"]["change"] == 0  # no other expert was ever used
    assert numbers["kl"]["lower"] > 0.001 and numbers["sequences"] == 16 and numbers["tokens"] == 16 * 63
    assert [each["domain"] for each in content["text"]["degraded"]] == ["numbers"]
    assert content["written"] is None and content["answers"] is None
    page = (tmp_path / "out" / "behaviour.md").read_text()
    assert "The domain numbers is degraded" in page and "| prose |" in page


def test_the_gate_fails_by_the_name_of_the_domain(run: Run, models: Path, tmp_path: Path) -> None:
    limits = ["--max-flips", 0.02, "--max-loss-rise", 0.05]
    result = run("gate", models / "base", models / "half", *reading(models), *limits, "-o", tmp_path / "gate")
    assert result.status == 1, result.err
    assert "the share of flips on numbers is more than 0.02" in result.out
    assert "The domain numbers is degraded" in result.out
    content = json.loads((tmp_path / "gate" / "gate.json").read_text())
    verdicts = {each["name"]: each["verdict"] for each in content["conditions"]}
    assert verdicts.keys() == {
        f"{what} on {of}" for what in ("share of flips", "rise of the loss") for of in ("prose", "numbers")
    }
    assert (verdicts["share of flips on prose"], verdicts["rise of the loss on prose"]) == ("pass", "pass")
    assert verdicts["share of flips on numbers"] == "fail" and content["tasks"] == []
    failures = ElementTree.parse(tmp_path / "gate" / "gate.xml").getroot().iter("failure")
    assert any("share of flips on numbers" in str(each.get("message")) for each in failures)


@pytest.mark.full
def test_compress_puts_in_place_only_what_passes_by_domain(run: Run, models: Path, tmp_path: Path) -> None:
    gate = [*reading(models), "--max-flips", 0.02]
    result = run(*compressing(models, tmp_path / "out", "letters.txt"), *gate)
    assert result.status == 1, result.err
    assert not (tmp_path / "out").exists() and "The domain numbers is degraded" in result.out
    kept = run(*compressing(models, tmp_path / "kept", "letters.txt"), *gate, "--keep-failed")
    assert kept.status == 1 and (tmp_path / "kept" / "gate.json").is_file()
    recipe = (tmp_path / "kept" / "recipe.yaml").read_text()
    assert "letters.txt=prose" in recipe and "max_flips: 0.02" in recipe and str(models) not in recipe
    succeeded(run("report", tmp_path / "kept", "-o", tmp_path / "report.html"))
    assert "The domain numbers is degraded" in (tmp_path / "report.html").read_text()


def test_answers_are_read_with_the_probabilities_of_their_ends(run: Run, models: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"word {n}", "answer": f"{n} and more"} for n in range(12)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--answers", f"{tmp_path / 'answers.jsonl'}=made"]
    result = succeeded(run("evaluate", models / "base", models / "half", *given, "--json"))
    content = json.loads(result.out)
    (row,) = content["answers"]["domains"]
    assert row["domain"] == "made" and row["sequences"] == 12 and len(content["each"]) == 12
    assert row["stop_tokens"][0]["name"] == "the answer" and row["stop_tokens"][0]["count"] == 12
    tokenizer = load_tokenizer(models / "base")
    ends = []
    for folder in ("base", "half"):
        stock, found = load_whole(models / folder, dtype="float32"), []
        for each in rows:
            answer = tokenizer(each["answer"], add_special_tokens=False)["input_ids"]
            ids = [*tokenizer(each["prompt"])["input_ids"], *answer]
            with torch.no_grad():
                found.append(float(stock(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)[END]))
        ends.append(sum(found) / len(found))
    here = row["stop_tokens"][0]["here"]
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
    gate = succeeded(run("gate", models / "base", models / "half", *asked, "--teacher-forced", "--max-flips", 0.5))
    assert [each["name"] for each in json.loads(gate.out)["conditions"]] == ["share of flips on answers of prompts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gate", "--text", "letters.txt"], "judged by --max-flips or --max-loss-rise"),
        (["gate", "--tasks", "moe_demo_facts", "--max-flips", 0.1], "judged by --max-flips or --max-loss-rise"),
        (["gate", "--text", "letters.txt", "--max-flips", 0], "max_flips"),
        (["evaluate", "--text", "missing.txt"], "text file missing.txt does not exist"),
        (["evaluate", "--text", "short.txt=few"], r"--text short.txt gives \d+ tokens, too few .* at least 128"),
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


def test_balanced_sources_are_weighed_by_their_kl_and_one_source_changes_nothing(models: Path, tmp_path: Path) -> None:
    weights = dict[str, bytes]()
    for balance, number in (("sum", 1), ("worst", 1), ("worst", 2)):
        sources = [str(models / name) for name in ("letters.txt", "digits.txt")[:number]]
        steps = default_steps(
            experts=4,
            strategy="count-guided",
            correct={"method": "ridge", "balance": balance},
            distill={"balance": balance, "steps": 8, "tokens_per_step": 128, "sequence_length": 32},
        )
        out = tmp_path / f"{balance}{number}"
        made = compress(
            models / "base", out, steps, calibration=sources, samples=32, sequence_length=32, evaluate=False
        )
        weights[out.name] = (out / "model.safetensors").read_bytes()
        curve = made.steps[-1]["result"]["curve"]
        assert all(("kl_by_source" in entry) is (number == 2) for entry in curve)
    assert weights["sum1"] == weights["worst1"] != weights["worst2"]
    for entry in curve:
        assert min(entry["kl_by_source"].values()) < entry["kl"] < max(entry["kl_by_source"].values())
    best = min(curve, key=lambda entry: max(entry["kl_by_source"].values()))
    assert made.steps[-1]["result"]["best"] == best["step"]
    state = TrainingState(tuple(read_as(Evaluation, entry) for entry in curve[:3]), (), ())
    grown = [
        math.exp(sum(entry["kl_by_source"][name] / max(entry["kl_by_source"].values()) for entry in curve[:3]))
        for name in curve[0]["kl_by_source"]
    ]
    assert list(state.balance.values()) == pytest.approx([2 * each / sum(grown) for each in grown])


@pytest.mark.full
def test_ridge_balances_several_sources_unless_it_is_told_not_to(models: Path, tmp_path: Path) -> None:
    weights = list[bytes]()
    for balance in (None, "worst", "sum"):
        steps = default_steps(experts=4, strategy="count-guided", correct={"method": "ridge", "balance": balance})
        sources = [str(models / name) for name in ("letters.txt", "digits.txt")]
        out = tmp_path / str(balance)
        compress(models / "base", out, steps, calibration=sources, samples=32, sequence_length=32, evaluate=False)
        weights.append((out / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_run_on_several_sources_names_the_degraded_one(run: Run, models: Path, tmp_path: Path) -> None:
    sources = [f"{models / 'letters.txt'}=0.8", f"{models / 'digits.txt'}=0.2"]
    arguments = compressing(models, tmp_path / "out", *sources, strategy="count-guided")
    result = succeeded(run(*arguments))
    assert "Held-out text by source" in result.out and "The domain digits is degraded" in result.out
    succeeded(run("report", tmp_path / "out", "-o", tmp_path / "report.html"))
    assert "The domain digits is degraded" in (tmp_path / "report.html").read_text()
    card = card_text(tmp_path / "out", "owner/name").text
    assert "The domain digits is degraded" in card and "Held-out text by source" in card
    again = run(*arguments, "--json")
    heldout = json.loads(again.out)["heldout"]
    assert [each["domain"] for each in heldout["domains"]] == ["digits", "letters"]
    assert [each["domain"] for each in heldout["degraded"]] == ["digits"]


ROWS = [f"{n * 7919 % 100_003} quick brown foxes jump over {n * 104_729 % 1_299_709} lazy dogs {n}" for n in range(120)]


def cutting(models: Path, out: Path, text: Path, *more: Any, correct: str = "ridge") -> list[Any]:
    return [*compressing(models, out, text, experts=2, correct=correct), *more]


def rows_in(folder: Path, rows: list[str]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def test_a_run_ends_with_the_figures_of_stock_models(run: Run, models: Path, tmp_path: Path) -> None:
    arguments = cutting(models, tmp_path / "out", rows_in(tmp_path, ROWS))
    made = succeeded(run(*arguments, "--json"))
    record = json.loads((tmp_path / "out" / "compression.json").read_text())["heldout"]
    (found,) = record["domains"]
    assert json.loads(made.out)["heldout"] == record and record["note"] == ""

    shuffled, stream = list(ROWS), list[int]()
    random.Random(0).shuffle(shuffled)
    for row in shuffled:
        stream += [*small.tokenizer()(row, add_special_tokens=False)["input_ids"], END]
    tokens = torch.tensor(stream[16 * 64 : (16 + 48) * 64]).view(48, 64)
    assert (found["sequences"], found["tokens"]) == (48, 48 * 63)
    with torch.no_grad():
        base, output = (
            AutoModelForCausalLM.from_pretrained(folder, dtype="auto")(tokens).logits[:, :-1].double()
            for folder in (models / "base", tmp_path / "out")
        )
    loss = [cross_entropy(each.mT, tokens[:, 1:], reduction="none").mean(1) for each in (base, output)]
    kl = (log_softmax(base, -1).exp() * (log_softmax(base, -1) - log_softmax(output, -1))).sum(-1).mean(1)
    flips = (base.argmax(-1) != output.argmax(-1)).double().mean(1)
    changes = {"loss": loss[1] - loss[0], "kl": kl, "flips": flips}
    assert float(kl.mean()) > 1e-4 and float(flips.mean()) > 0.01
    assert found["loss"]["base"] == pytest.approx(float(loss[0].mean()), abs=2e-6)
    for name, change in changes.items():
        assert found[name]["change"] == pytest.approx(float(change.mean()), abs=2e-6)
        assert found[name]["standard_error"] == pytest.approx(float(change.std()) / 48**0.5, abs=2e-6)

    half = student.isf(0.025, 47) * found["loss"]["standard_error"]
    losses = found["loss"]
    words = f"{losses['base']:.4f} → {losses['compressed']:.4f}", f"{losses['change']:+.4f} ± {half:.4f}"
    for shown in (run(*arguments).out, card_text(tmp_path / "out", "owner/name").text):
        assert f"{words[0]} ({words[1]}) nats per token" in " ".join(shown.split())
    assert run("report", tmp_path / "out", "-o", tmp_path / "report.html").status == 0
    page = (tmp_path / "report.html").read_text()
    assert all(word in page.partition("</header>")[0] for word in words)


def test_comparing_changes_no_weight_and_no_plan(run: Run, models: Path, tmp_path: Path) -> None:
    text = rows_in(tmp_path, ROWS)
    for out, more in (("with", ()), ("without", ("--no-evaluate",))):
        assert run(*cutting(models, tmp_path / out, text, *more)).status == 0
    records = [json.loads((tmp_path / out / "compression.json").read_text()) for out in ("with", "without")]
    assert records[0].pop("heldout") and records[0] == records[1]
    for name in ("model.safetensors", "recipe.yaml"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
    plan = ("plan", *cutting(models, tmp_path / "plan.json", text)[1:])
    assert run(*plan).status == 0 and run("apply", tmp_path / "plan.json", "-o", tmp_path / "applied").status == 0
    applied = tmp_path / "applied" / "compression.json"
    assert applied.read_bytes() == (tmp_path / "with" / "compression.json").read_bytes()


def test_a_plan_whose_text_is_gone_is_applied_and_not_compared(run: Run, models: Path, tmp_path: Path) -> None:
    text = rows_in(tmp_path, ROWS)
    plan = ["plan", *cutting(models, tmp_path / "plan.json", text, correct="none")[1:]]
    assert run(*cutting(models, tmp_path / "made", text, correct="none")).status == run(*plan).status == 0
    text.unlink()
    moved = run("apply", tmp_path / "plan.json", "-o", tmp_path / "moved")
    assert moved.status == 0 and re.search("not compared on held-out text: .*rows.jsonl does not exist", moved.err)
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("made", "moved")]
    assert weights[0] == weights[1]


def test_text_that_is_too_short_or_not_read_is_no_fault(run: Run, models: Path, tmp_path: Path) -> None:
    short = run(*cutting(models, tmp_path / "short", rows_in(tmp_path, ROWS[:5]), correct="none"))
    assert short.status == 0 and "sequences to compare on, fewer than 8; give more text" in short.err
    sizes = ("--sequence-length", 16, "--samples", 100)
    little = succeeded(run(*cutting(models, tmp_path / "little", rows_in(tmp_path, ROWS[:25]), *sizes)))
    assert "Held-out text (10 sequences)" in little.out and "had too little text for this alone" in little.out
    none = ["compress", models / "base", "-o", tmp_path / "none", "--experts", 4, "--strategy", "model-centric"]
    done = run(*none, "--correct", "none")
    assert done.status == 0 and "eld-out text" not in done.out + done.err
    for out in ("short", "none"):
        assert "heldout" not in json.loads((tmp_path / out / "compression.json").read_text())


@pytest.mark.parametrize(
    "more",
    [
        ("--format", "mone"),
        *(pytest.param(each, marks=pytest.mark.full) for each in (("--quantize", "int8"), ("--split", 2))),
    ],
    ids=str,
)
def test_outputs_of_every_kind_are_compared(more: tuple[Any, ...], run: Run, models: Path, tmp_path: Path) -> None:
    arguments = cutting(models, tmp_path / "out", rows_in(tmp_path, ROWS), *more, correct="none")
    if "mone" in more:  # which takes neither a strategy nor --correct none
        del arguments[arguments.index("--strategy") : arguments.index("none") + 1]
    made = succeeded(run(*arguments, "--json"))
    (found,) = json.loads(made.out)["heldout"]["domains"]
    tokens, losses = found["tokens"], found["loss"]
    assert tokens == 48 * 63 and 0 < found["kl"]["change"] < 5 and losses["base"] != losses["compressed"]
