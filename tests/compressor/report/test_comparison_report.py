import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from compressor.cli.terminal import print_report
from compressor.document import markdown as rendered
from compressor.document.picture import DPI
from compressor.report.comparison_report import Comparison, comparison_figure, write_reports
from compressor.report.comparison_rows import Row, label
from tests.support.comparison_results import EXPERTS, base, comparison, comparisons, full, row
from tests.support.rendered_figures import assert_texts_apart, canvases
from tests.support.report_data import table

SIZES = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, " B": 1, " kB": 1e3, " MB": 1e6, " GB": 1e9}


def markdown(made: Comparison) -> str:
    return rendered.markdown(made.document())


def size(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.e+]+)(.*)", text).groups()  # type: ignore[union-attr]
    return float(number) * SIZES[unit]


def find(rows: list[dict[str, str]], wanted: Row) -> dict[str, str]:
    keys = {"model": label(wanted), "experts": str(wanted.variant.experts)}
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
        assert size(cells["parameters"]) == pytest.approx(each.variant.parameters, rel=6e-3)
        assert size(cells["peak memory"]) == pytest.approx(each.peak_memory, rel=6e-3)
        if each is made.rows[0]:
            assert cells["increase"] == cells["layer error"] == "-"
        else:
            assert float(cells["increase"]) == pytest.approx(each.loss - made.rows[0].loss, abs=5.1e-5)
            assert float(cells["layer error"]) == pytest.approx(each.error, abs=5.1e-5)


def assert_bold_is_best(made: Comparison) -> None:
    shown = table(markdown(made))
    bold = [cells for cells in shown if cells["loss"].startswith("**")]
    counts = {each.variant.experts for each in made.rows[1:]}
    assert sorted(int(cells["experts"].strip("*")) for cells in bold) == sorted(counts)
    for cells in bold:
        assert all(cell.startswith("**") and cell.endswith("**") for cell in cells.values())
        least = min(each.loss for each in made.rows[1:] if each.variant.experts == int(cells["experts"].strip("*")))
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
        base(by_source={"loss": {"wiki": 1.0, "code": 1.5}}),
        row(
            "reap",
            8,
            2.0,
            by_source={
                "loss": {"wiki": 1.75, "code": 3.5},
                "kl": {"wiki": 0.5, "code": 0.25},
                "flips": {"wiki": 0.125, "code": 0.875},
            },
            degraded=("code",),
            errors_by_source={"loss": {"wiki": 0.0625}},
        ),
        row("auto", 8, 2.5, by_source={"loss": {"wiki": 2.5}}),
    ]
    text = markdown(comparison(rows, evaluation={"wiki": 4096, "code": 2048}))
    losses, kl, flips = (text.partition(f"{what} by evaluation source")[2] for what in ("Loss", "KL", "Flips"))
    shown = table(losses.partition("KL by evaluation source")[0])
    assert [cells["wiki"] for cells in shown] == ["1.0000", "+0.7500 ± 0.0625", "+1.5000"]
    assert [cells["code"] for cells in shown] == ["1.5000", "**+2.0000**", "-"]
    assert list(shown[0]) == ["model", "experts", "wiki", "code"]  # wiki rises by 2.25 in all
    assert [cells["worst source"].strip("*") for cells in table(text.partition("Loss by")[0])] == [
        "-",
        "code +2.0000",
        "wiki +1.5000",
    ]
    assert [cells["wiki"] for cells in table(kl.partition("Flips by")[0])] == ["-", "0.5000", "-"]
    assert [cells["code"] for cells in table(flips)] == ["-", "**0.8750**", "-"]
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
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in capsys.readouterr().out.splitlines()]


def test_the_printed_table_groups_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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


def drawn(made: Comparison) -> Figure:
    (canvas,) = canvases(comparison_figure(made))
    return canvas


def labelled(figure: Figure) -> dict[str, Line2D]:
    (legend,) = figure.legends
    drawn = {
        (line.get_color(), line.get_linestyle(), line.get_marker(), _face(line)): line for line in figure.axes[0].lines
    }
    assert len(drawn) == len(figure.axes[0].lines)  # no two lines look alike
    return {
        text.get_text(): drawn[handle.get_color(), handle.get_linestyle(), handle.get_marker(), _face(handle)]
        for handle, text in zip(legend.get_lines(), legend.get_texts(), strict=True)
    }


def _face(line: Line2D) -> str:
    return to_hex(line.get_markerfacecolor())


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def expected(made: Comparison) -> dict[str, list[tuple[float, float]]]:
    """The points of each line by label: from the base, by falling bytes, the mean of equal ones."""
    together: dict[str, dict[int, list[float]]] = {}
    for each in made.rows[1:]:
        name = label(each, "random") if each.variant.is_random else label(each)
        together.setdefault(name, {}).setdefault(each.variant.bytes, []).append(each.loss - made.rows[0].loss)
    return {
        name: [
            (made.rows[0].variant.bytes, 0.0),
            *((size, sum(by_size[size]) / len(by_size[size])) for size in sorted(by_size, reverse=True)),
        ]
        for name, by_size in together.items()
    }


def assert_lines(figure: Figure, made: Comparison) -> None:
    found = {text.replace("\n", " "): points(line) for text, line in labelled(figure).items()}
    assert found.pop("base") == [(0.0, 0.0), (1.0, 0.0)]  # from edge to edge, at no increase
    wanted = expected(made)
    for name in list(found):
        plain = name.removesuffix(" (one drop)").partition(" (mean and range of ")[0]
        found[plain] = found.pop(name)
    assert found.keys() == wanted.keys()
    for name, line in wanted.items():
        assert found[name] == [pytest.approx(point, abs=1e-5) for point in line]


def test_lines_start_at_the_base_and_are_listed_as_they_end() -> None:
    """Colour is the strategy, line style the correction, and random drops are a dashed mean in a band."""
    made = full()
    figure = drawn(made)
    assert_lines(figure, made)
    lines, axes = labelled(figure), figure.axes[0]
    ends = [points(line)[-1][1] for line in lines.values()]
    assert len(ends) == 17 and ends == sorted(ends, reverse=True)
    sizes = [row("size", count, 0.0).variant.bytes for count in (EXPERTS, 12, 8)]
    assert axes.get_xlim()[0] > sizes[0] > sizes[2] > axes.get_xlim()[1]  # falls to the right, where the legend is
    assert comparison_figure(made).title.startswith("org/tiny-moe")
    assert "nats per token" in axes.get_ylabel() and "base's 1.2500" in axes.get_ylabel()
    assert "experts" in axes.get_xlabel() and "base has 16" in axes.get_xlabel()
    assert lines["reap"].get_color() == lines["reap + tune"].get_color() != lines["auto"].get_color()
    styles = [[lines[f"{name}{correction}"] for name in ("reap", "auto")] for correction in ("", " + ridge", " + tune")]
    assert all(one.get_linestyle() == other.get_linestyle() for one, other in styles)
    assert len({str(one._unscaled_dash_pattern) for one, _ in styles}) == 3  # type: ignore[attr-defined]
    assert lines["random (mean and range of 3)"].get_linestyle() == "--"
    (band,) = axes.collections
    corners = {(float(x), round(float(y), 9)) for path in band.get_paths() for x, y in path.vertices}
    increases = [(0, 0), (1, 1.75), (1, 2.25), (2, 3.5), (2, 4.5)]
    assert corners == {(sizes[place], increase) for place, increase in increases}


@settings(max_examples=8)
@given(comparisons())
def test_any_rows_give_their_lines(made: Comparison) -> None:
    assert_lines(drawn(made), made)


LONG = "a-strategy-of-a-third-party (with=several, options=each, of_some=length, and_a_cost=$x^2$)"
PICTURES = {
    "many counts": full((192, 128, 127, 96, 64, 32, 16, 8, 4, 2), 256),
    "long names": comparison(
        [base(), row(LONG, 8, 2.0), *(row(f"{LONG} {n}", 8, 2.0 + n) for n in range(30))], model="org/$m_" + "x" * 90
    ),
    "both signs": comparison([base(), *(row(f"x{n}", 8, 1.25 + 1.4 * (-10.0) ** -n) for n in range(5))]),
    "small spread": comparison([base(), row("reap", 8, 1.5), row("auto", 8, 1.75)]),
    "better than the base": comparison([base(), row("reap", 8, 1.2), row("auto", 8, 1.3), row("tune", 8, 4.0)]),
    "no formulas": comparison([base(), row("$^$", 8, 2.0)], model=r"$\frac$"),
    "the base alone": comparison([base()]),
    "no numbers": comparison([base(), row("reap", 8, math.nan), row("auto", 8, math.inf), row("x", 8, 2.0)]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_covers_another_or_leaves_the_picture(name: str) -> None:
    (canvas,) = canvases(comparison_figure(PICTURES[name]))
    assert_texts_apart(canvas)
    (axes,), (legend,) = canvas.axes, canvas.legends
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert axes.get_window_extent().width > 5 * DPI


def test_alternative_text_has_each_line() -> None:
    rows = [base(), row("auto", 12, 1.5), row("auto", 8, 1.75), row("reap", 8, 2.0), row("random", 8, 2.5, seed=0)]
    made = comparison(rows)
    assert comparison_figure(made).alt == (
        "Loss above the base's 1.2500 by experts kept. auto: 12 +0.2500, 8 +0.5000. reap: 8 +0.7500. random: 8 +1.2500."
    )
    assert "random (one drop)" in labelled(drawn(made))
