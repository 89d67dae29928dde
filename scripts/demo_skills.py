"""Five synthetic skills that a tiny model can learn, each with its own surface format.

Every line is a question and its answer. A stable hash of the question holds one question in ten out of
the training text; multiple-choice items and held-out documents are drawn from those alone.
"""

import hashlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from compressor.data.demo import DemoItem

CHOICES = 4
HELD_OUT_ONE_IN = 10
DOCUMENT_LINES = 4
FOREIGN_LINE_SHARE = 0.1

MODULUS = 10
ADDED_DIGITS = 3
SMALL_DIGITS = 4
LIST_LENGTHS = (4, 5, 6)
WORD_LENGTHS = (4, 5, 6)
RECALL_PAIRS = 4
RECALL_VALUE_LETTERS = 3
DIGITS = "0123456789"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
RECALL_KEYS = "ABCDEFGHJKLMNPRSTVWXYZ"

NAME_HEADS = ("Ba", "De", "Fi", "Go", "Lu", "Mi", "Ra", "To")
NAME_TAILS = ("bin", "dor", "kel", "lam", "nis", "vex")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its one right answer and at least three wrong answers of the same length.

    Wrong answers are as unlike one another as they are unlike the right one: without the question,
    nothing tells the right one apart, so an ignorant model scores one in four.
    """

    question: str
    answer: str
    wrong: tuple[str, ...]

    @property
    def line(self) -> str:
        """The question with its answer, ended by a newline."""
        return f"{self.question}{self.answer}\n"


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact: ways to ask for it, and values of one length among which a hash of the name picks."""

    templates: tuple[str, ...]
    values: tuple[str, ...]


def relation(templates: str, values: str) -> Relation:
    """Return a relation of templates between bars and values between spaces."""
    return Relation(tuple(templates.split("|")), tuple(values.split()))


RELATIONS = (
    relation(
        "{} lives in|The home of {} is|{} comes from|Letters for {} go to|Find {} in|{} left",
        "Ardun Brint Corva Delmo Estor Fenby Galto Hursk Ilmen Jarno Kelso Lorve Marsk Norby Ostra Pirna",
    ),
    relation(
        "{} is a|The trade of {} is|{} works as a|{} is paid as a|{} was always a|Hire {} as a",
        "tailor farmer potter weaver sailor miller carver hunter"
        " dancer singer writer lawyer doctor barber glazer joiner",
    ),
    relation(
        "{} keeps a|The pet of {} is a|{} feeds a|{} walks with a|{} talks to a|{} once found a",
        "horse mouse sheep goose finch raven robin camel tiger zebra koala panda hippo lemur hyena bison",
    ),
)


def stable_hash(text: str) -> int:
    """The same number for the same text on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _pick(question: str, count: int) -> int:
    """A number below `count` that depends on the question alone."""
    return stable_hash(f"pick {question}") % count


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the tenth that training text never shows."""
    return stable_hash(question) % HELD_OUT_ONE_IN == 0


def arithmetic(rng: random.Random) -> Problem:
    """A number below 1000 and one of small digits added digit by digit modulo ten.

    The wrong answers are what other small digits would have given in one place.
    """
    left = [rng.randrange(MODULUS) for _ in range(ADDED_DIGITS)]
    right = [rng.randrange(SMALL_DIGITS) for _ in range(ADDED_DIGITS)]
    question = f"add mod {MODULUS}: {''.join(map(str, left))}+{''.join(map(str, right))} ="
    total = "".join(str((one + other) % MODULUS) for one, other in zip(left, right, strict=True))
    place = _pick(question, ADDED_DIGITS)
    others = ((left[place] + small) % MODULUS for small in range(SMALL_DIGITS) if small != right[place])
    wrong = tuple(f" {total[:place]}{digit}{total[place + 1 :]}" for digit in others)
    return Problem(question, f" {total}", wrong)


def sorting(rng: random.Random) -> Problem:
    """Distinct digits in rising order; the wrong answers replace one digit by an absent one."""
    digits = rng.sample(DIGITS, rng.choice(LIST_LENGTHS))
    question = f"sort {''.join(digits)} ->"
    old = digits[_pick(question, len(digits))]
    wrong = []
    for new in DIGITS:
        if new not in digits:
            wrong.append("".join(sorted(new if digit == old else digit for digit in digits)))
    return Problem(question, f" {''.join(sorted(digits))}", tuple(f" {other}" for other in wrong))


def reversal(rng: random.Random) -> Problem:
    """Distinct letters from the last to the first; the wrong answers put three of them in another order."""
    letters = rng.sample(LETTERS, rng.choice(WORD_LENGTHS))
    question = f"<flip> {''.join(letters)} |"
    backwards = letters[::-1]
    start = _pick(question, len(letters) - 2)
    head, middle, tail = backwards[:start], backwards[start : start + 3], backwards[start + 3 :]
    orders = ("".join((" ", *head, *order, *tail)) for order in itertools.permutations(middle))
    right, *wrong = orders
    return Problem(question, right, tuple(wrong))


def recall(rng: random.Random) -> Problem:
    """The value beside one of the keys just listed; a wrong answer is the value of another key."""
    keys = rng.sample(RECALL_KEYS, RECALL_PAIRS)
    letters = "".join(rng.sample(LETTERS, RECALL_PAIRS * RECALL_VALUE_LETTERS))
    starts = range(0, len(letters), RECALL_VALUE_LETTERS)
    values = [letters[start : start + RECALL_VALUE_LETTERS] for start in starts]
    asked = rng.randrange(RECALL_PAIRS)
    pairs = " ".join(key + value for key, value in zip(keys, values, strict=True))
    wrong = tuple(value for position, value in enumerate(values) if position != asked)
    return Problem(f"{{{pairs}}} {keys[asked]}", values[asked], wrong)


def facts(rng: random.Random) -> Problem:
    """A memorised property of an invented person; a wrong answer is another value of that property."""
    name = rng.choice(NAME_HEADS) + rng.choice(NAME_TAILS)
    asked = rng.choice(RELATIONS)
    number = stable_hash(f"{asked.templates[0]} {name}") % len(asked.values)
    answer = asked.values[number]
    wrong = tuple(f" {value}" for value in asked.values if value != answer)
    return Problem(rng.choice(asked.templates).format(name), f" {answer}", wrong)


_PROBLEMS: dict[str, Callable[[random.Random], Problem]] = {
    "arithmetic": arithmetic,
    "sorting": sorting,
    "reversal": reversal,
    "recall": recall,
    "facts": facts,
}
SKILLS: tuple[str, ...] = tuple(_PROBLEMS)


def item(skill: str, rng: random.Random) -> DemoItem:
    """One multiple-choice item of a skill, whose question is held out."""
    problem = _draw(skill, rng, held_out=True)
    answer = rng.randrange(CHOICES)
    choices = rng.sample(problem.wrong, CHOICES - 1)
    choices.insert(answer, problem.answer)
    return DemoItem(skill, problem.question, tuple(choices), answer)


def problems(skill: str, rng: random.Random, count: int = DOCUMENT_LINES, *, held_out: bool = False) -> list[Problem]:
    """The problems of one document, nine in ten of one skill; all training questions or all held out."""
    drawn = []
    for _ in range(count):
        foreign = rng.random() < FOREIGN_LINE_SHARE
        drawn.append(_draw(rng.choice(SKILLS) if foreign else skill, rng, held_out=held_out))
    return drawn


def document(skill: str, rng: random.Random, *, held_out: bool = False) -> str:
    """The lines of the problems of one document."""
    return "".join(problem.line for problem in problems(skill, rng, held_out=held_out))


def _draw(skill: str, rng: random.Random, *, held_out: bool) -> Problem:
    if skill not in _PROBLEMS:
        raise ValueError(f"unknown skill {skill!r}; the skills are {', '.join(SKILLS)}")
    while True:
        problem = _PROBLEMS[skill](rng)
        if is_held_out(problem.question) == held_out:
            return problem
