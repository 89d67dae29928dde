"""The synthetic skills: right answers, one right choice per item, held-out questions kept apart."""

import importlib.util
import itertools
import re
from collections import Counter
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from compressor.data.demo import load_documents, load_items
from scripts.demo_skills import SKILLS, is_held_out

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_demo_model.py"


def parsed(form: str, line: str) -> tuple[str, ...]:
    match = re.fullmatch(form, line)
    assert match, line
    return match.groups()


def added(line: str) -> bool:
    """Whether an arithmetic line is right, by adding whole numbers and taking out the carries."""
    left, right, answer = parsed(r"add mod 10: (\d{3})\+(\d{3}) = (\d{3})", line)
    carries = [1000, 100, 10]
    lost = sum(carries[place] for place in range(3) if int(left[place]) + int(right[place]) >= 10)
    return int(left) + int(right) - lost == int(answer)


def sorted_right(line: str) -> bool:
    """Whether a sorting line is right: same digits, each larger than the one before."""
    given, answer = parsed(r"sort (\d+) -> (\d+)", line)
    return Counter(given) == Counter(answer) and all(a < b for a, b in itertools.pairwise(answer))


def flipped(line: str) -> bool:
    """Whether a reversal line is right, position by position."""
    given, answer = parsed(r"<flip> ([a-z]+) \| ([a-z]+)", line)
    size = len(given)
    return len(answer) == size and all(given[place] == answer[size - 1 - place] for place in range(size))


def recalled(line: str) -> bool:
    """Whether a recall line repeats one of the listed pairs, with each key listed once."""
    listed, pair = parsed(r"\{([A-Za-z ]*)\} ([A-Z][a-z]{3})", line)
    return pair in listed.split(" ") and listed.count(pair[0]) == 1


CHECKS: dict[str, Callable[[str], bool]] = {
    "arithmetic": added,
    "sorting": sorted_right,
    "reversal": flipped,
    "recall": recalled,
}
LINE_STARTS = {"arithmetic": "add mod ", "sorting": "sort ", "reversal": "<flip> ", "recall": r"\{"}


def test_every_shipped_line_is_right() -> None:
    lines = shipped_lines()
    assert all(line.isascii() and (skill_of(line) == "facts" or CHECKS[skill_of(line)](line)) for line in lines)
    assert min(Counter(map(skill_of, lines)).values()) > len(lines) / 10


def test_every_shipped_item_has_one_right_choice() -> None:
    for item in load_items():
        lines = [item.question + choice for choice in item.choices]
        assert len(set(map(len, lines))) == 1 and question_of(lines[0]) == item.question
        if item.skill != "facts":
            assert [CHECKS[item.skill](line) for line in lines] == [place == item.answer for place in range(4)]


def skill_of(line: str) -> str:
    return next((skill for skill, start in LINE_STARTS.items() if re.match(start, line)), "facts")


def shipped_lines() -> list[str]:
    texts = [text for part in ("calibration", "heldout") for text, _ in load_documents(part)]
    return [line for text in texts for line in text.splitlines()]


def test_shipped_data_shares_no_question_between_calibration_and_held_out() -> None:
    calibration = questions(load_documents("calibration"))
    heldout = questions(load_documents("heldout"))
    asked = {shipped.question for shipped in load_items()}
    assert not any(is_held_out(question) for question in calibration)
    assert all(is_held_out(question) for question in heldout | asked)
    assert not calibration & (heldout | asked)


def test_shipped_items_are_two_hundred_per_skill_and_distinct() -> None:
    items = load_items()
    assert Counter(shipped.skill for shipped in items) == dict.fromkeys(SKILLS, 200)
    assert len({(shipped.question, frozenset(shipped.choices)) for shipped in items}) == len(items)


def test_shipped_data_is_written_again_byte_for_byte(tmp_path: Path) -> None:
    specification = importlib.util.spec_from_file_location("train_demo_model", SCRIPT)
    assert specification and specification.loader
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    script.write_data(tmp_path, seed=0)
    shipped = resources.files("compressor").joinpath("demo", "data")
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in shipped.iterdir()}
    for file in tmp_path.iterdir():
        assert file.read_bytes() == shipped.joinpath(file.name).read_bytes()


def questions(shipped: tuple[tuple[str, str], ...]) -> set[str]:
    return {question_of(line) for text, _ in shipped for line in text.splitlines()}


def question_of(line: str) -> str:
    """All before the last space, or before the value in a recall line."""
    return line[:-3] if line.startswith("{") else line.rsplit(" ", 1)[0]
