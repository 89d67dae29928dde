"""The page of results shows what was measured, and the script keeps what its tables need."""

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from scripts.benchmarks import frame, real, results
from tests.support import small


def pair(share: float, scheme: str, nbytes: int, increase: float) -> dict[str, Any]:
    fields = {"share": share, "scheme": scheme, "split": 1, "bytes": nbytes, "bits": 16.0, "loss": 2.0 + increase}
    return {**fields, "loss_increase": increase, "loss_error": 0.001}


def subject(name: str, increase: float) -> results.Subject:
    pairs = [pair(1, "none", 8_000_000, 0.0), pair(1, "int4", 3_000_000, 0.5), pair(0.5, "none", 4_000_000, increase)]
    experiment = {"command": "moe-compress compare", "date": "2026-11-28", "seeds": [0]}
    return results.Subject(name, name, {"sizes": {**experiment, "rows": results.rows_of({"pairs": pairs}, seed=0)}})


@pytest.mark.parametrize("page", results.PAGES, ids=lambda page: page.name)
def test_the_pages_show_the_data_beside_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert results.written_page(text, results.read_subjects()) == text


def test_the_page_is_short() -> None:
    page = results.PAGES[0].read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- table: .*?<!-- end of table -->", "", page, flags=re.DOTALL)
    assert len(by_hand.split()) <= 1000


def test_sizes_no_smaller_model_beats_are_bold() -> None:
    rows = results.sizes_table([subject("better", 0.1), subject("worse", 0.7)]).splitlines()
    assert rows[-1] == "| 1/2 | as stored | 4.00 | **0.100** | 4.00 | 0.700 |"
    assert rows[3] == "| all | int4 | 3.00 | **0.500** | 3.00 | **0.500** |"


def test_rows_of_strategies_count_sub_experts_as_parts_and_join_random_drops() -> None:
    base = {"name": "base", "strategy": "base", "experts": 8, "loss": 2.0}
    row = {"experts": 8, "split": 2, "bytes": 5, "correction": "none", "undone": False, "loss_increase": 0.25}
    named = [{**row, "name": "auto", "strategy": "auto"}, {**row, "name": "random (seed 0)", "strategy": "random"}]
    rows = results.rows_of({"rows": [base, *named]}, seed=3)
    assert [(entry["name"], entry["share"], entry["seed"]) for entry in rows] == [("auto", 0.5, 3), ("random", 0.5, 3)]


def test_long_commands_are_broken_between_options() -> None:
    command = " ".join(["moe-compress compare", *(f"--option{index:02} value" for index in range(12))])
    lines = frame.wrapped(command).splitlines()
    assert all(len(line) <= frame.COLUMNS + 2 for line in lines)
    assert " ".join(line.removesuffix("\\").strip() for line in lines) == command


def real_row(name: str, nbytes: int, flips: float, **more: Any) -> dict[str, Any]:
    row = real.ROWS[name]
    place = {"name": name, "title": row.title, "share": row.share, "method": row.method, "scheme": row.scheme}
    figures = {"loss": [0.5, 0.1], "kl": [0.4, 0.1], "flips": [flips, 0.01], "answers": ["Paris", "a|b", "long " * 99]}
    return {**place, "bytes": nbytes, "cpu": 30.0, "forward": 10.0, "seconds": 20.0, "memory": 10**9, **figures, **more}


def experiment(*rows: dict[str, Any]) -> dict[str, Any]:
    base = {"loss": 2.0, "bytes": 8_000_000, "loops": 0.01, "answers": ["Paris.", "", ""]}
    return {"base": base, "forward": {"tokens": 1024, "seconds": 5.0, "cpu": 10.0}, "rows": [*rows]}


def test_rows_of_a_real_model_come_by_size_with_intervals_and_stock_passes() -> None:
    smaller = real_row("default-75", 5_000_000, 0.25, loops=0.02)
    lines = real.rows_table(experiment(smaller, real_row("int4", 6_000_000, 0.1)), ["int4", "default-75"]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| base", "| all experts, int4", "| 3/4, default"]
    cells = "| 3/4, default | 5.0 | +0.500 ± 0.196 | 0.400 ± 0.196 | 75.0% ± 2.0% | 2.0% |  | 3.0 | 20 | 1.00 |"
    assert lines[-1] == cells


@pytest.mark.parametrize(("flips", "enough"), [(0.18, True), (0.2, False)])
def test_the_verdict_compares_greedy_tokens_with_those_of_int4(flips: float, enough: bool) -> None:
    text = real.verdict(experiment(real_row("default-75", 5, flips), real_row("int4", 6, 0.1)))
    assert ("at least the 90%" in text) is enough and ("quantise this model first" in text) is not enough


def test_answers_take_one_line_of_the_table() -> None:
    lines = real.answers_table(experiment(real_row("default-75", 5, 0.1)), ["int4", "default-75"]).splitlines()
    assert lines[2] == "| What is the capital of France? | Paris. | Paris |"
    assert lines[3].endswith(r"|  | a\|b |") and len(lines) == 5 and lines[4].endswith("long … |")


@pytest.mark.full
def test_a_real_model_is_measured_row_by_row_and_only_once(tmp_path: Path) -> None:
    """From the commands to the tables, on a model of random weights."""
    model = small.save(tmp_path / "tiny", max_position_embeddings=1024)
    small.tokenizer(small.CHAT).save_pretrained(model)
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": part}) for part in small.TEXT.split("\n\n")))
    questions = tmp_path / "questions.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"What is {number}?"}]} for number in range(3)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    files = {"model": str(model), "text": str(text), "heldout": str(text), "questions": str(questions)}
    sizes = {"samples": 8, "length": 64, "chats": 3, "budget": "1MB", "rows": ["default-75", "random-50"]}
    given = Namespace(**files, **sizes, llama=None, llama_cpp=None)
    measured = real.measure(given, tmp_path / "work")
    default, dropped = measured["rows"]
    experts = AutoConfig.from_pretrained(model).num_local_experts
    assert AutoConfig.from_pretrained(tmp_path / "work" / "random-50").num_local_experts == experts / 2
    assert default["bytes"] < measured["base"]["bytes"] and default["chats"] == 3 and "chats" not in dropped
    assert measured["forward"]["tokens"] == 8 * 64 and default["decoding"]["ONNX Runtime"] > 0
    pages = real.sections("tiny", measured)
    assert all(row["command"].split(" --")[0] in pages["tiny, rows"] for row in measured["rows"])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").glob("*.json")}
    assert real.measure(given, tmp_path / "work") == measured
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "work").glob("*.json")}
