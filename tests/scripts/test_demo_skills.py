"""The synthetic skills: right answers, one right choice per item, held-out questions kept apart."""

import importlib.util
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from compressor.data.demo import Item, load_documents, load_items
from scripts.demo_skills import SKILLS, is_held_out, item, training_text

DRAWS = 300
SCRIPT = Path(__file__).parents[2] / "scripts" / "train_demo_model.py"


def parsed(form: str, line: str) -> tuple[str, ...]:
    """The groups of a line that has a form."""
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
FACT_FORMS = {
    "home": ("NAME lives in|The home of NAME is|NAME comes from|Letters for NAME go to|Find NAME in|NAME left"),
    "trade": ("NAME is a|The trade of NAME is|NAME works as a|NAME is paid as a|NAME was always a|Hire NAME as a"),
    "pet": ("NAME keeps a|The pet of NAME is a|NAME feeds a|NAME walks with a|NAME talks to a|NAME once found a"),
}


def fact(line: str) -> tuple[str, str, str]:
    """Name, kind and value of a line about a person; exactly one kind of fact may match it."""
    found = []
    for kind, form in FACT_FORMS.items():
        match = re.fullmatch(f"(?:{form}) ([A-Za-z]+)".replace("NAME", "([A-Z][a-z]{4})"), line)
        if match:
            name, value = (group for group in match.groups() if group)
            found.append((name, kind, value))
    assert len(found) == 1, line
    return found[0]


@pytest.fixture(scope="module")
def known_facts() -> dict[tuple[str, str], str]:
    """The facts that training text states, which must never contradict one another."""
    rng = random.Random(1)
    known: dict[tuple[str, str], str] = {}
    for _ in range(8000):
        name, kind, value = fact(training_text("facts", rng).rstrip("\n"))
        assert known.setdefault((name, kind), value) == value
    return known


@pytest.mark.parametrize("skill", CHECKS)
def test_training_text_is_right(skill: str) -> None:
    rng = random.Random(3)
    assert all(CHECKS[skill](training_text(skill, rng).rstrip("\n")) for _ in range(DRAWS))


@pytest.mark.parametrize("skill", CHECKS)
def test_exactly_one_choice_is_right(skill: str) -> None:
    rng = random.Random(4)
    for _ in range(DRAWS):
        drawn = item(skill, rng)
        right = [CHECKS[skill](drawn.question + choice) for choice in drawn.choices]
        assert right == [place == drawn.answer for place in range(4)]


def test_facts_asked_were_all_told_and_one_choice_is_right(known_facts: dict[tuple[str, str], str]) -> None:
    assert len(known_facts) == 48 * 3
    rng = random.Random(5)
    for _ in range(DRAWS):
        drawn = item("facts", rng)
        stated = [fact(drawn.question + choice) for choice in drawn.choices]
        right = [known_facts[name, kind] == value for name, kind, value in stated]
        assert right == [place == drawn.answer for place in range(4)]


@pytest.mark.parametrize("skill", SKILLS)
def test_items_are_held_out_with_choices_of_one_length(skill: str) -> None:
    rng = random.Random(6)
    drawn = [item(skill, rng) for _ in range(DRAWS)]
    assert all(is_held_out(asked.question) for asked in drawn)
    assert all(len({len(choice) for choice in asked.choices}) == 1 for asked in drawn)
    assert all(question_of(asked.question + asked.choices[0]) == asked.question for asked in drawn)
    places = Counter(asked.answer for asked in drawn)
    assert min(places[place] for place in range(4)) > DRAWS / 8


def test_item_refuses_repeated_choices() -> None:
    with pytest.raises(ValueError, match="repeated choices"):
        Item("sorting", "sort 21 ->", (" 12", " 12", " 13", " 14"), 0)


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
    """The questions of all lines of the documents."""
    return {question_of(line) for text, _ in shipped for line in text.splitlines()}


def question_of(line: str) -> str:
    """All before the last space, or before the value in a recall line."""
    return line[:-3] if line.startswith("{") else line.rsplit(" ", 1)[0]
