"""The page of results shows what was measured, and the script keeps what its tables need."""

from typing import Any

from scripts.benchmarks import results


def pair(share: float, scheme: str, nbytes: int, increase: float) -> dict[str, Any]:
    fields = {"share": share, "scheme": scheme, "split": 1, "bytes": nbytes, "bits": 16.0, "loss": 2.0 + increase}
    return {**fields, "loss_increase": increase, "loss_error": 0.001}


def subject(name: str, increase: float) -> results.Subject:
    pairs = [pair(1, "none", 8_000_000, 0.0), pair(1, "int4", 3_000_000, 0.5), pair(0.5, "none", 4_000_000, increase)]
    experiment = {"command": "moe-compress compare", "date": "2026-11-28", "seeds": [0]}
    return results.Subject(name, name, {"sizes": {**experiment, "rows": results.rows_of({"pairs": pairs}, seed=0)}})


def test_the_page_shows_the_data_beside_it() -> None:
    page = results.PAGE.read_text(encoding="utf-8")
    assert results.written_page(page, results.read_subjects()) == page


def test_the_page_is_short() -> None:
    assert len(results.PAGE.read_text(encoding="utf-8").split()) <= 2000


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
    lines = results.wrapped(command).splitlines()
    assert all(len(line) <= results.WIDTH + 2 for line in lines)
    assert " ".join(line.removesuffix("\\").strip() for line in lines) == command
