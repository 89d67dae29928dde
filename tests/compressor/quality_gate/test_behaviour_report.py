import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compressor.answers.answering import Answer
from compressor.answers.prompts import Prompt
from compressor.document.blocks import Marked, plain_words
from compressor.quality_gate.behaviour import AnswerPair, Behaviour, Written
from compressor.quality_gate.behaviour_report import FIRST, marked, write_behaviour
from compressor.quality_gate.endings import Ending, rates


def ending(text: str, ended: bool = True, loop: int | None = None) -> Ending:
    return Ending(ended, loop is not None, loop, len(text), 0.0)


@pytest.mark.parametrize(
    ("text", "other", "loop", "difference", "looped"),
    [
        ("one two three", "one too three", None, ["wo"], []),
        ("one two", "one two", None, [], []),
        ("one two", "one two three", None, [], []),
        ("one two three", "one two", None, [" three"], []),
        ("one two two two", "one", 8, [" two"], ["two two"]),
        ("two two two", "other", 0, [], ["two two two"]),
        ("a <b> & c", "a", 4, [" <b"], ["> & c"]),
    ],
)
def test_marks_leave_the_text_as_it_is(text: str, other: str, loop: Any, difference: Any, looped: list[str]) -> None:
    words = marked(text, other, ending(text, loop=loop))
    assert isinstance(words, tuple) and plain_words(words) == text
    found = [each for each in words if isinstance(each, Marked)]
    assert [each.text for each in found if each.why == "difference"] == difference
    assert [each.text for each in found if each.why == "loop"] == looped


def test_the_page_begins_with_what_went_wrong_and_escapes_all_text(tmp_path: Path) -> None:
    def pair(number: int, base: Ending, smaller: Ending, text: str = "<b>&") -> AnswerPair:
        prompt = Prompt.of(f"<script>{number}", "code" if number % 2 else "<i>")
        answers = [Answer(prompt.id, 0, (), each, "end") for each in ("<b>&", text)]
        return AnswerPair(prompt, 0, *answers, base, smaller)

    good, cut, looping = ending("x"), ending("x", ended=False), ending("x", ended=False, loop=1)
    foreign, refused = replace(good, other_language=True), replace(good, refused=True)
    pairs = (
        pair(0, good, good), pair(1, good, good, "y"), pair(2, cut, good), pair(3, good, cut), pair(4, good, looping),
        pair(5, good, foreign), pair(6, good, refused),
    )  # fmt: skip
    assert sorted(map(FIRST.index, (each.verdict for each in pairs))) == [*range(len(FIRST))]
    endings = [(each.base_ending, each.smaller_ending) for each in pairs]
    found = rates([each.prompt.domain for each in pairs], endings, 0.95)
    behaviour = Behaviour("<base>", "<smaller>", 0.95, Written(7, 1, {}, found, pairs))
    write_behaviour(behaviour, tmp_path / "out")
    page = (tmp_path / "out" / "answers.html").read_text(encoding="utf-8")
    assert re.findall(r'"><h3>([a-z ]+) <span', page) == list(FIRST)
    assert "<script>" not in page and "<b>" not in page and "<i>" not in page
