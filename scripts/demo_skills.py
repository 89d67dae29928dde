"""Five synthetic skills that a tiny model can learn, each with its own surface format.

Every line is a question and its answer. A stable hash of the question holds one question in ten out of
the training text; multiple-choice items and held-out documents are drawn from those alone.
"""

import hashlib
import itertools
import random
from dataclasses import dataclass

from compressor.data.demo import DemoItem

CHOICES = 4
HELD_OUT_ONE_IN = 10
DOCUMENT_LINES = 4
FOREIGN_LINE_SHARE = 0.1

ADDED_DIGITS = 3
SMALL_DIGITS = 4
LENGTHS = (4, 5, 6)  # of lists of digits, and of words
RECALL_PAIRS = 4
RECALL_VALUE_LETTERS = 3
DIGITS = "0123456789"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
RECALL_KEYS = "ABCDEFGHJKLMNPRSTVWXYZ"

NAME_HEADS = ("Ba", "De", "Fi", "Go", "Lu", "Mi", "Ra", "To")
NAME_TAILS = ("bin", "dor", "kel", "lam", "nis", "vex")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its one right answer and at least three wrong ones of its length, as unlike one another as it.

    So without the question nothing tells the right one apart, and an ignorant model scores one in four.
    """

    question: str
    answer: str
    wrong: tuple[str, ...]

    @property
    def line(self) -> str:
        """Return the question with its answer, ended by a newline."""
        return f"{self.question}{self.answer}\n"


# Kinds of facts: ways to ask for one, and values of one length among which a hash of the name picks.
RELATIONS = (
    (
        "{} lives in|The home of {} is|{} comes from|Letters for {} go to|Find {} in|{} left",
        "Ardun Brint Corva Delmo Estor Fenby Galto Hursk Ilmen Jarno Kelso Lorve Marsk Norby Ostra Pirna",
    ),
    (
        "{} is a|The trade of {} is|{} works as a|{} is paid as a|{} was always a|Hire {} as a",
        "tailor farmer potter weaver sailor miller carver hunter"
        " dancer singer writer lawyer doctor barber glazer joiner",
    ),
    (
        "{} keeps a|The pet of {} is a|{} feeds a|{} walks with a|{} talks to a|{} once found a",
        "horse mouse sheep goose finch raven robin camel tiger zebra koala panda hippo lemur hyena bison",
    ),
)


def stable_hash(text: str) -> int:
    """Return the same number for the same text on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _pick(question: str, count: int) -> int:
    """Return a number below `count` that depends on the question alone."""
    return stable_hash(f"pick {question}") % count


def is_held_out(question: str) -> bool:
    """Return True for a question of the tenth that training text never shows."""
    return stable_hash(question) % HELD_OUT_ONE_IN == 0


def arithmetic(rng: random.Random) -> Problem:
    """Add digits modulo ten; wrong answers are what other small digits would have given in one place."""
    left = [rng.randrange(10) for _ in range(ADDED_DIGITS)]
    right = [rng.randrange(SMALL_DIGITS) for _ in range(ADDED_DIGITS)]
    question = f"add mod 10: {''.join(map(str, left))}+{''.join(map(str, right))} ="
    total = "".join(str((one + other) % 10) for one, other in zip(left, right, strict=True))
    place = _pick(question, ADDED_DIGITS)
    others = [(left[place] + small) % 10 for small in range(SMALL_DIGITS) if small != right[place]]
    wrong = tuple(f" {total[:place]}{digit}{total[place + 1 :]}" for digit in others)
    return Problem(question, f" {total}", wrong)


def sorting(rng: random.Random) -> Problem:
    """Sort distinct digits; the wrong answers replace one digit by an absent one."""
    digits = rng.sample(DIGITS, rng.choice(LENGTHS))
    question = f"sort {''.join(digits)} ->"
    old = digits[_pick(question, len(digits))]
    wrong = []
    for new in DIGITS:
        if new not in digits:
            wrong.append("".join(sorted(new if digit == old else digit for digit in digits)))
    return Problem(question, f" {''.join(sorted(digits))}", tuple(f" {other}" for other in wrong))


def reversal(rng: random.Random) -> Problem:
    """Reverse distinct letters; the wrong answers put three of them in another order."""
    letters = rng.sample(LETTERS, rng.choice(LENGTHS))
    question = f"<flip> {''.join(letters)} |"
    backwards = letters[::-1]
    start = _pick(question, len(letters) - 2)
    head, middle, tail = backwards[:start], backwards[start : start + 3], backwards[start + 3 :]
    right, *wrong = ["".join((" ", *head, *order, *tail)) for order in itertools.permutations(middle)]
    return Problem(question, right, tuple(wrong))


def recall(rng: random.Random) -> Problem:
    """Recall the value beside one of the keys just listed; a wrong answer is the value of another key."""
    keys = rng.sample(RECALL_KEYS, RECALL_PAIRS)
    letters = "".join(rng.sample(LETTERS, RECALL_PAIRS * RECALL_VALUE_LETTERS))
    starts = range(0, len(letters), RECALL_VALUE_LETTERS)
    values = [letters[start : start + RECALL_VALUE_LETTERS] for start in starts]
    asked = rng.randrange(RECALL_PAIRS)
    pairs = " ".join(key + value for key, value in zip(keys, values, strict=True))
    wrong = tuple(value for position, value in enumerate(values) if position != asked)
    return Problem(f"{{{pairs}}} {keys[asked]}", values[asked], wrong)


def facts(rng: random.Random) -> Problem:
    """Name a memorised property of an invented person; a wrong answer is another value of that property."""
    name = rng.choice(NAME_HEADS) + rng.choice(NAME_TAILS)
    joined_templates, joined_values = rng.choice(RELATIONS)
    templates, values = joined_templates.split("|"), joined_values.split()
    answer = values[stable_hash(f"{templates[0]} {name}") % len(values)]
    wrong = tuple(f" {value}" for value in values if value != answer)
    return Problem(rng.choice(templates).format(name), f" {answer}", wrong)


_PROBLEMS = {skill.__name__: skill for skill in (arithmetic, sorting, reversal, recall, facts)}
SKILLS: tuple[str, ...] = tuple(_PROBLEMS)


def item(skill: str, rng: random.Random) -> DemoItem:
    """Return one multiple-choice item of a skill, whose question is held out."""
    problem = _draw(skill, rng, held_out=True)
    answer = rng.randrange(CHOICES)
    choices = rng.sample(problem.wrong, CHOICES - 1)
    choices.insert(answer, problem.answer)
    return DemoItem(skill, problem.question, tuple(choices), answer)


def problems(skill: str, rng: random.Random, count: int, *, held_out: bool = False) -> list[Problem]:
    """Return the problems of one document, nine in ten of one skill; all training questions or all held out."""
    drawn = []
    for _ in range(count):
        foreign = rng.random() < FOREIGN_LINE_SHARE
        drawn.append(_draw(rng.choice(SKILLS) if foreign else skill, rng, held_out=held_out))
    return drawn


def document(skill: str, rng: random.Random, *, held_out: bool = False) -> str:
    """Return the lines of the problems of one document."""
    return "".join(problem.line for problem in problems(skill, rng, DOCUMENT_LINES, held_out=held_out))


def _draw(skill: str, rng: random.Random, *, held_out: bool) -> Problem:
    while True:
        problem = _PROBLEMS[skill](rng)
        if is_held_out(problem.question) == held_out:
            return problem
