"""Questions and answers in five domains, of which every answer is 25 to 160 tokens long and ends by itself.

How long an answer is follows from its question (the steps of a function, the friends in a story), so that a
model has to keep track of where it is to end; what a damaged one loses first. A stable hash of the question
holds one in ten out of the training text.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from scripts.demo_skills import is_held_out, words

NAMES = words(
    "Ada Bela Cora Dario Edda Falk Gita Hugo Ida Jonas Kira Levi Mira Nils Olga Pavel Rosa Stan Tilda Ugo Vera Wim"
)
TRADES = words("baker weaver sailor miller tailor potter gardener painter teacher printer")
TOWNS = words("Ardun Brint Corva Delmo Estor Fenby Galto Hursk Ilmen Jarno")
COLOURS = words("red blue green white black yellow grey silver")
THINGS = words("lantern kettle ladder basket mirror violin compass saddle ribbon clock")
ROOMS = words("kitchen garden cellar attic hall stable workshop library")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
LISTS = words("values numbers items points scores sizes")
VERBS = words("clean collect reduce prepare filter convert")
WORDS = words(
    "apple bread candle door eagle flute glove honey island jacket knife lemon marble needle onion pepper quill "
    "river spoon table umbrella window yarn zebra"
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A question of a domain and its answer; the end token is the chat template's matter."""

    domain: str
    question: str
    answer: str

    def messages(self, *, answered: bool = True) -> list[dict[str, str]]:
        """The chat, or its question alone, as the messages of a chat template."""
        turns = [{"role": "user", "content": self.question}]
        return [*turns, {"role": "assistant", "content": self.answer}] if answered else turns


def code(rng: random.Random) -> Chat:
    """A function with a line for each step that is asked for, and a line that calls it."""
    verb, given = rng.choice(VERBS), rng.choice(LISTS)
    small = rng.randint(2, 9)
    steps = {
        f"keep those above {small}": f"[x for x in {given} if x > {small}]",
        f"keep those below {small * 10}": f"[x for x in {given} if x < {small * 10}]",
        "keep the even ones": f"[x for x in {given} if x % 2 == 0]",
        "keep the odd ones": f"[x for x in {given} if x % 2 == 1]",
        f"add {small} to each": f"[x + {small} for x in {given}]",
        f"multiply each by {small}": f"[x * {small} for x in {given}]",
        "sort them": f"sorted({given})",
        "reverse them": f"list(reversed({given}))",
        "drop the first": f"{given}[1:]",
        "drop doubles": f"list(set({given}))",
    }
    last = {"their sum": "sum", "the largest": "max", "the smallest": "min", "how many remain": "len"}
    wanted = rng.sample(list(steps), rng.randint(2, 6))
    result = rng.choice(list(last))
    name = f"{verb}_{given}"
    asked = "; ".join(wanted)
    question = rng.choice(
        (
            f"Write a Python function {name}({given}): {asked}; return {result}.",
            f"I need {name} in Python. It takes {given}. Steps: {asked}. It returns {result}.",
        )
    )
    body = "".join(f"    {given} = {steps[step]}\n" for step in wanted)
    call = ", ".join(str(rng.randint(1, 99)) for _ in range(3))
    answer = (
        f"```python\ndef {name}({given}):\n{body}    return {last[result]}({given})\n\nprint({name}([{call}]))\n```"
    )
    return Chat("code", question, answer)


def prose(rng: random.Random) -> Chat:
    """A story in which somebody asks each friend of the question in turn, and finds the thing with the last one."""
    hero, *friends = rng.sample(NAMES, rng.randint(3, 7))
    trade, town = rng.choice(TRADES), rng.choice(TOWNS)
    thing = f"{rng.choice(COLOURS)} {rng.choice(THINGS)}"
    listed = f"{', '.join(friends[:-1])} and {friends[-1]}"
    question = rng.choice(
        (
            f"Tell a story: {hero}, a {trade} of {town}, looks for a {thing} and asks {listed}.",
            f"Write about {hero} the {trade} who lost a {thing} in {town}. The friends are {listed}.",
        )
    )
    story = [
        rng.choice(
            (
                f"One {rng.choice(DAYS)} {hero}, a {trade} of {town}, could not find the {thing}.",
                f"In {town} lived a {trade} called {hero}, whose {thing} was gone one {rng.choice(DAYS)}.",
            )
        )
    ]
    for friend in friends[:-1]:
        room = rng.choice(ROOMS)
        story.append(
            rng.choice(
                (
                    f"{hero} asked {friend}, who looked in the {room} and found nothing.",
                    f"Then {hero} went to {friend}, but the {room} was empty.",
                    f'"Have you seen it?" {hero} asked. "Not in my {room}," said {friend}.',
                    f"{friend} came from the {room} and had not seen the {thing}.",
                )
            )
        )
    room, friend = rng.choice(ROOMS), friends[-1]
    story.append(
        rng.choice(
            (
                f"At last {friend} opened the {room}, and there was the {thing}. {hero} went home happy.",
                f"In the end {friend} brought the {thing} out of the {room}, and {hero} thanked everybody.",
            )
        )
    )
    return Chat("prose", question, "\n".join(story) if rng.random() < 0.2 else " ".join(story))


def tools(rng: random.Random) -> Chat:
    """One tool call in JSON for each thing to be done."""
    asked, calls = [], []
    for _ in range(rng.randint(1, 4)):
        name, day, count = rng.choice(NAMES), rng.choice(DAYS), rng.randint(2, 12)
        thing, town = rng.choice(THINGS), rng.choice(TOWNS)
        wish, tool, arguments = rng.choice(
            (
                (
                    f"book a table for {count} in {town} on {day}",
                    "book_table",
                    {"town": town, "day": day, "guests": count},
                ),
                (f"order {count} of {thing} for {name}", "order", {"item": thing, "count": count, "customer": name}),
                (f"remind {name} of the {thing} on {day}", "remind", {"person": name, "about": thing, "day": day}),
                (f"tell me the weather in {town} on {day}", "weather", {"place": town, "day": day}),
            )
        )
        asked.append(wish)
        calls.append(f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>")
    question = rng.choice(("Please {}.", "With the tools: {}.")).format(", then ".join(asked))
    return Chat("tools", question, "\n".join(calls))


def thinking(rng: random.Random) -> Chat:
    """A sum whose running totals are thought aloud before the answer."""
    numbers = [rng.randint(1, 20) for _ in range(rng.randint(3, 7))]
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    listed = ", ".join(map(str, numbers))
    question = rng.choice((f"Add up {listed}.", f"{name} counts each {thing}: {listed}. How many in all?"))
    total, lines = numbers[0], [f"Start with {numbers[0]}."]
    for number in numbers[1:]:
        lines.append(f"{total} + {number} = {total + number}")
        total += number
    thought = "\n".join(lines)
    return Chat(
        "thinking", question, f"<think>\n{thought}\n</think>\n\nThe total of {len(numbers)} numbers is {total}."
    )


def lists(rng: random.Random) -> Chat:
    """A numbered list: the words of the question sorted, reversed or as they are, or numbers counted in steps."""
    if rng.random() < 0.4:
        first, step, count = rng.randint(1, 40), rng.randint(1, 5), rng.randint(4, 12)
        last = first + step * (count - 1)
        question = f"Count from {first} to {last} in steps of {step}."
        entries = [str(first + step * index) for index in range(count)]
    else:
        chosen = rng.sample(WORDS, rng.randint(4, 9))
        how = rng.choice(("in the order given", "from last to first", "sorted"))
        question = f"List {how}: {', '.join(chosen)}."
        entries = {"in the order given": chosen, "from last to first": chosen[::-1], "sorted": sorted(chosen)}[how]
    numbered = "\n".join(f"{number}. {entry}" for number, entry in enumerate(entries, 1))
    return Chat("lists", question, f"{numbered}\nThat makes {len(entries)}.")


_DOMAINS: dict[str, Callable[[random.Random], Chat]] = {
    "code": code,
    "prose": prose,
    "tools": tools,
    "thinking": thinking,
    "lists": lists,
}
DOMAINS: tuple[str, ...] = tuple(_DOMAINS)


def chat(domain: str, rng: random.Random, *, held_out: bool = False) -> Chat:
    """A chat of a domain whose question is held out, or is not."""
    while True:
        drawn = _DOMAINS[domain](rng)
        if is_held_out(drawn.question) == held_out:
            return drawn


def chats(seed: str, count: int, *, held_out: bool = False) -> list[Chat]:
    """`count` chats of different questions that take the domains in turn; the same ones for the same seed."""
    rng = random.Random(seed)
    drawn: dict[str, Chat] = {}
    while len(drawn) < count:
        new = chat(DOMAINS[len(drawn) % len(DOMAINS)], rng, held_out=held_out)
        drawn.setdefault(new.question, new)
    return list(drawn.values())
