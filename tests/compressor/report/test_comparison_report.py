"""The comparison's table and files: cells read back, the best in bold, nothing left behind by a failure."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given

from compressor.cli.terminal import print_report
from compressor.document import markdown as rendered
from compressor.report.comparison_report import (
    Comparison,
    Row,
    label,
    write_reports,
)
from tests.support.comparison_results import EXPERTS, base, comparison, comparisons, full, row
from tests.support.report_data import table

SIZES = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, " B": 1, " kB": 1e3, " MB": 1e6, " GB": 1e9}


def markdown(made: Comparison) -> str:
    return rendered.markdown(made.document())


def size(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.e+]+)(.*)", text).groups()  # type: ignore[union-attr]
    return float(number) * SIZES[unit]


def find(rows: list[dict[str, str]], wanted: Row) -> dict[str, str]:
    keys = {"model": label(wanted), "experts": str(wanted.experts)}
    (found,) = [cells for cells in rows if all(cells[key].strip("*") == value for key, value in keys.items())]
    return {name: cell.strip("*") for name, cell in found.items()}


def test_cells_are_the_rows_numbers() -> None:
    made = full()
    shown = table(markdown(made))
    assert len(shown) == len(made.rows)
    for each in made.rows:
        cells = find(shown, each)
        assert float(cells["loss"]) == pytest.approx(each.loss, abs=5.1e-5)
        assert float(cells["KL"]) == pytest.approx(each.kl, abs=5.1e-5)
        assert float(cells["perplexity"]) == pytest.approx(math.exp(each.loss), rel=1e-3)
        assert float(cells["seconds"]) == pytest.approx(each.seconds, abs=0.051)
        assert size(cells["parameters"]) == pytest.approx(each.parameters, rel=6e-3)
        assert size(cells["peak memory"]) == pytest.approx(each.peak_memory, rel=6e-3)
        if each is made.rows[0]:
            assert cells["increase"] == cells["layer error"] == "-"
        else:
            assert float(cells["increase"]) == pytest.approx(each.loss - made.rows[0].loss, abs=5.1e-5)
            assert float(cells["layer error"]) == pytest.approx(each.error, abs=5.1e-5)


def assert_bold_is_best(made: Comparison) -> None:
    shown = table(markdown(made))
    bold = [cells for cells in shown if cells["loss"].startswith("**")]
    counts = {each.experts for each in made.rows[1:]}
    assert sorted(int(cells["experts"].strip("*")) for cells in bold) == sorted(counts)
    for cells in bold:
        assert all(cell.startswith("**") and cell.endswith("**") for cell in cells.values())
        least = min(each.loss for each in made.rows[1:] if each.experts == int(cells["experts"].strip("*")))
        assert cells["loss"] == f"**{least:.4f}**"


@given(comparisons())
def test_any_rows_make_a_sorted_table_with_one_bold_row_for_each_count(made: Comparison) -> None:
    shown = table(markdown(made))
    assert len(shown) == len(made.rows)
    assert shown[0]["model"] == "base"
    order = [(-int(cells["experts"].strip("*")), float(cells["loss"].strip("*"))) for cells in shown[1:]]
    assert order == sorted(order)
    assert_bold_is_best(made)


def test_each_of_several_evaluation_sources_has_a_column() -> None:
    rows = [
        base(loss_by_source={"wiki": 1.0, "code": 1.5}),
        row(
            "reap",
            8,
            2.0,
            loss_by_source={"wiki": 1.75, "code": 2.25},
            degraded=("code",),
            kl_by_source={"wiki": 0.5, "code": 0.25},
            flips_by_source={"wiki": 0.125, "code": 0.75},
        ),
        row("auto", 8, 2.5, loss_by_source={"wiki": 2.5}),
    ]
    text = markdown(comparison(rows, evaluation={"wiki": 4096, "code": 2048}))
    losses, kl, flips = (text.partition(f"{what} by evaluation source")[2] for what in ("Loss", "KL", "Flips"))
    shown = table(losses.partition("KL by evaluation source")[0])
    assert [cells["wiki"] for cells in shown] == ["1.0000", "1.7500", "2.5000"]
    assert [cells["code"] for cells in shown] == ["1.5000", "**2.2500**", "-"]
    assert [cells["wiki"] for cells in table(kl.partition("Flips by")[0])] == ["-", "0.5000", "-"]
    assert [cells["code"] for cells in table(flips)] == ["-", "**0.7500**", "-"]
    assert [cells["model"] for cells in shown] == ["base", "reap", "auto"]
    assert "evaluated on wiki (4,096 tokens) and code (2,048 tokens), seed 7" in text
    assert "evaluation source" not in markdown(comparison([rows[0], rows[2]]))


def test_data_is_named_without_folders() -> None:
    assert "Calibrated with wiki.txt (65,536 tokens) in 34.6 s" in markdown(comparison([base()]))
    parts = [{"source": "/a/one.txt", "tokens": 10}, {"source": "/b/two.txt", "tokens": 20}, {"source": "demo"}]
    several = {"source": "/a/one.txt + /b/two.txt + demo", "sources": parts}
    text = markdown(comparison([base()], calibration=several))
    assert "Calibrated with one.txt (10 tokens), two.txt (20 tokens) and demo in" in text
    assert "Calibrated with no data" in markdown(comparison([base()], calibration={}))


def test_reports_are_three_files_in_a_new_folder(tmp_path: Path) -> None:
    made, folder = full(), tmp_path / "out"
    written = write_reports(made, folder)
    assert sorted(tmp_path.iterdir()) == [folder]
    assert sorted(written) == sorted(folder.iterdir())
    assert [path.name for path in written] == ["comparison.json", "comparison.md", "comparison.png"]
    assert json.loads(written[0].read_text()) == json.loads(json.dumps(made.to_dict()))
    text = written[1].read_text(encoding="utf-8")
    (picture,) = [line for line in text.splitlines() if line.startswith("![")]
    assert text.replace(f"{picture}\n\n", "") == markdown(made) and picture.endswith("(comparison.png)")
    (tmp_path / "plain").mkdir()
    assert folder.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_is_no_number_is_null_in_strict_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = comparison([base(), row("reap", 8, math.nan), row("auto", 8, 800.0)])
    print_report(True, made.to_dict(), ())
    write_reports(made, tmp_path / "out")
    for text in (capsys.readouterr().out, (tmp_path / "out" / "comparison.json").read_text()):
        rows = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["rows"]
        assert rows[1]["loss"] is None and rows[1]["loss_increase"] is None
        assert rows[2]["loss"] == 800 and rows[2]["perplexity"] is None


def printed(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of a printed table's lines, the header's among them."""
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in capsys.readouterr().out.splitlines()]


def test_the_printed_table_groups_counts_sorts_by_loss_and_folds_random_drops(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    made = full()
    print_report(False, None, made.brief())
    lines = [cells for cells in printed(capsys) if len(cells) == 11]
    assert [lines[0][0], *lines[0][1:4:2]] == ["base", str(EXPERTS), "1.2500"]
    order = [(-int(cells[1]), float(cells[3])) for cells in lines]
    assert order == sorted(order) and len(lines) == 1 + 2 * (15 + 1)
    mean = 1.25 + 0.5 * 8
    name, experts, _, *losses = lines[-1][:5]
    assert (name, experts) == ("random (3 seeds), loss 4.7500..5.7500", "8")
    assert losses == [f"{mean:.4f}", f"{mean - 1.25:+.4f}"]
