import contextlib
import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from compressor.document import blocks as b
from compressor.document.terminal import show
from compressor.quality_gate.report import gate_blocks
from compressor.quality_gate.verdict import GateCondition
from tests.support.gate_results import gate, task

HOSTILE = r"[bold red]x[/] [link=file:///etc] \[a] {b} :smile: [/nothing]"
COLUMNS = ("name", "first figure", "second figure", "third figure")
WIDE = b.Table("A table", COLUMNS, (("a", "1234567", "2", "3"), ("b", "4", "5", "6")), optional=COLUMNS[:1:-1])


@pytest.fixture(name="terminal")
def _terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    return monkeypatch


def shown(capsys: pytest.CaptureFixture[str], *blocks: object) -> str:
    show(blocks)  # type: ignore[arg-type]
    return re.sub(r"\x1b(\[[0-9;]*m|\]8;.*?\x1b\\)", "", capsys.readouterr().out)


def header(text: str) -> str:
    return " ".join(" ".join(line[1:-1].split("┃")) for line in text.splitlines() if line.startswith("┃"))


def test_columns_go_one_by_one(capsys: pytest.CaptureFixture[str], terminal: pytest.MonkeyPatch) -> None:
    seen = []
    for width in range(90, 20, -1):
        terminal.setenv("COLUMNS", str(width))
        text = shown(capsys, WIDE)
        gone = [name for name in COLUMNS[:1:-1] if name.split()[0] not in header(text).split()]
        seen.append(tuple(gone))
        assert ("In a wider terminal" in text) == bool(gone)
        assert not gone or f"or with --json: {', '.join(gone)}." in text
        table = [line for line in text.splitlines() if line[:1] in "┏┃┡│└"]
        assert all(cell_len(line) <= width for line in table) and "1234567" in text  # numbers stay whole
    assert list(dict.fromkeys(seen)) == [(), ("third figure",), ("third figure", "second figure")]


def test_words_fold_before_a_column_goes(capsys: pytest.CaptureFixture[str], terminal: pytest.MonkeyPatch) -> None:
    name = "a name of many words that takes more room than is left on one line of it"
    terminal.setenv("COLUMNS", "60")
    text = shown(capsys, b.Table("", ("name", "one", "two"), ((name, "0.1234", "5"),), optional=("two",)))
    cells = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert " ".join(cells) == name and len(cells) > 1 and "two" in header(text) and "0.1234" in text


@pytest.mark.parametrize(
    "words",
    [HOSTILE, (HOSTILE,), b.Code(HOSTILE), b.Strong(HOSTILE), b.Note(HOSTILE), b.Toned(HOSTILE, "bad", "✗")],
    ids=lambda words: type(words).__name__,
)
def test_nothing_is_taken_for_markup(
    words: b.Words, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    blocks = (
        b.Heading(HOSTILE), b.Facts(((HOSTILE, words), ("several", b.Items((words, words))))), b.Text(words),
        b.Items((words,)), b.Table(HOSTILE, (HOSTILE, "b"), ((words, words),)), b.Listing(HOSTILE),
    )  # fmt: skip
    assert shown(capsys, *blocks).count(HOSTILE) == 1 + 4 + 1 + 1 + 4 + 1


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=30))
def test_any_word_is_shown_as_it_is(word: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        show([b.Text(word)])
    assert printed.getvalue() == f"{word}\n"


def test_paragraphs_stay_on_one_line(capsys: pytest.CaptureFixture[str], terminal: pytest.MonkeyPatch) -> None:
    links = b.Link("paper", "https://a.org/b"), b.Link("https://a.org/b", "https://a.org/b"), b.Link("below", "#below")
    assert shown(capsys, *map(b.Text, links)) == "paper (https://a.org/b)\nhttps://a.org/b\nbelow\n"
    terminal.setenv("COLUMNS", "40")
    text = "word " * 40
    assert shown(capsys, b.Text(text), b.Items((text,)), b.Listing(text)) == f"{text}\n- {text}\n{text}\n"
    assert shown(capsys, b.Figure("a", "b", "c", ()), b.Details("d", (b.Text("e"),))) == ""


def test_a_heading_names_the_table_below_it_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(
        capsys, b.Heading("Gone"), b.Text("said"), b.Heading("Facts"), b.Facts((("a", "b"),)), b.Facts((("c", "d"),))
    )
    assert text.count("Facts") == 1 and "Gone" not in text
    assert "Own" in (text := shown(capsys, b.Heading("Above"), b.Table("Own", ("a",), ()))) and "Above" not in text


def test_rows_have_their_rules_and_numbers_end_at_the_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # in the log of a CI job, where nothing limits a table
    assert "third figure" in header(shown(capsys, WIDE))
    rows = tuple((name, "1") for name in "abcd")
    lines = shown(capsys, b.Table("", ("n", "x"), rows, ruled={0, 2})).splitlines()
    kinds = "".join(line[2] if line.startswith("│") else "-" for line in lines if line[0] in "│├")
    assert kinds == "a-bc-d"
    wide = (("long name", "1", "x"), ("b", "1000", "words"))
    text = shown(capsys, b.Table("", ("a", "b", "c"), wide, texts=frozenset({"c"})))
    assert "│ long name │    1 │ x     │" in text and "│ b         │ 1000 │ words │" in text


def test_colours_repeat_what_words_say(capsys: pytest.CaptureFixture[str], terminal: pytest.MonkeyPatch) -> None:
    show([b.Text(b.Toned("failed", "bad", "✗")), b.Text("so it is", "good")])
    assert capsys.readouterr().out == "\x1b[31mfailed\x1b[0m\n\x1b[32mso it is\x1b[0m\n"


VERDICTS = [b.Toned(word, "bad", "✗") for word in ("pass", "fail", "inconclusive")]
WORD_CELLS = st.text(st.sampled_from("abcdef  _/.-"), max_size=90)
NUMBER_CELLS = st.integers(0, 10**12).map(lambda value: f"{value:,}")


@st.composite
def any_table(draw: st.DrawFn) -> b.Table:
    """A table of words and numbers under names of any length, with a verdict in its last column."""
    columns = draw(st.lists(st.text(st.sampled_from("abcdef "), min_size=1, max_size=30), min_size=1, max_size=14))
    texts = {name for name in columns if draw(st.booleans())}
    kinds = [WORD_CELLS if name in texts else NUMBER_CELLS for name in columns]
    rows = draw(st.lists(st.tuples(*kinds, st.sampled_from(VERDICTS)), min_size=1, max_size=4))
    optional = draw(st.lists(st.sampled_from(columns), unique=True))
    return b.Table(draw(WORD_CELLS), (*columns, "verdict"), rows, {*texts, "verdict"}, optional)


def drawn(block: b.Table, width: int, is_terminal: bool) -> list[str]:
    """Return the lines of a table, without colours."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("COLUMNS", str(width))
        if is_terminal:
            patch.setenv("FORCE_COLOR", "1")
        show([block])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()).splitlines()
    return [line for line in lines if line[:1] in tuple("┏┃┡│├└")]


@given(any_table(), st.sampled_from([80, 100, 120]), st.booleans())
def test_any_table_fits_and_shows_its_verdicts(block: b.Table, width: int, is_terminal: bool) -> None:
    lines = drawn(block, width, is_terminal)
    assert {cell_len(line) for line in lines} and max(map(cell_len, lines)) <= width
    assert all(line[-1] in "┓┃┩│┤┘" for line in lines)  # nothing is cut at the right
    shown_verdicts = [line.split("│")[-2].strip() for line in lines if line[0] == "│"]
    assert [cell for cell in shown_verdicts if cell] == [row[-1].text for row in block.rows]  # type: ignore[union-attr]


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_gates_own_tables_fit(width: int, is_terminal: bool) -> None:
    long = task("leaderboard_math_counting_and_prob_hard", "inconclusive", metric="exact_match", items=123_456)
    condition = GateCondition("drop over all items with missing answers at their worst", "--max-drop", 0.01, 0.04, 0.0,
                              0.06, 123_456, "answers to prompts", "inconclusive", 0.9, 0.8)  # fmt: skip
    tables = [
        block for block in gate_blocks(replace(gate(long), conditions=(condition,))) if isinstance(block, b.Table)
    ]
    assert len(tables) == 2
    for block in tables:
        lines = drawn(block, width, is_terminal)
        assert max(map(cell_len, lines)) <= width
        assert sum("inconclusive" in line for line in lines) == len(block.rows)
