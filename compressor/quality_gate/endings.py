"""How answers end: by themselves or not, in a loop, with thinking or a tool call left open; how
they repeat, whether they are in the language that was asked for, and whether they refuse.

Loop: an answer loops if its last tokens are one sequence of at most `PERIOD` tokens, at least
`TIMES` times over and `LEAST` tokens in all; or if of the 4-grams of its last `WINDOW` tokens less
than `DISTINCT` are different ones, where there are at least `LEAST_WINDOW`. The first is how
Holtzman et al. (ICLR 2020, arXiv:1904.09751) recognise a text that is stuck: it ends in a phrase
that is repeated. The second is seq-rep-4 of Welleck et al. (ICLR 2020, arXiv:1908.04319) above 1 -
`DISTINCT`, which finds loops that count or vary; they report 0.006 for people's text and up to 0.44
for greedy text of GPT-2. The end token is no part of an answer here."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from compressor.answers.answering import Answer
from compressor.answers.prompts import Prompt
from compressor.frozen import frozen
from compressor.quality_gate.language import Wanted, is_in_another, refuses
from compressor.quality_gate.options import LENGTH, OTHER_LANGUAGE, REFUSALS
from compressor.quality_gate.statistics import PairedItems, measure

PERIOD, TIMES, LEAST = 64, 4, 16  # tokens; LEAST keeps a rule or an ellipsis from being a loop
WINDOW, LEAST_WINDOW, DISTINCT = 256, 64, 0.3
GRAM = 4
ALL = "all together"  # of the domains
NAME = r"[^\s<>\[\]◁▷'\"{}]*"
TAG = re.compile(rf"[<\[◁](?!/){NAME}(?:think|reason|tool.?call){NAME}[>\]▷]", re.IGNORECASE)
FENCE = re.compile(r"^```json\s*\n(.*?)(^```|\Z)", re.MULTILINE | re.DOTALL)


def loop_start(tokens: Sequence[int]) -> int | None:
    """Return the index of the token at which an answer's final loop begins; None without one. [S]
    -> index."""
    count = len(tokens)
    for period in range(1, min(PERIOD, count // TIMES) + 1):
        alike = period
        while alike < count and tokens[count - 1 - alike] == tokens[count - 1 - alike + period]:
            alike += 1
        if alike >= max(TIMES * period, LEAST):
            return count - alike
    return None


def repeated_share(tokens: Sequence[int]) -> float:
    """Return the share of 4-grams that occurred before: 1 - different / all, 0 for fewer than two
    (seq-rep-4)."""
    grams = list(zip(*(tokens[begin:] for begin in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@frozen
class Markers:
    """Texts that open and close thinking and tool calls in a model's chat template."""

    thinking: tuple[tuple[str, str], ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    has_tools: bool = False

    @classmethod
    def of(cls, tokenizer: Any) -> "Markers":
        """Find the pairs in a tokenizer's chat template or among its added tokens."""
        template = getattr(tokenizer, "chat_template", None) or ""
        if not isinstance(template, str):  # several, by name
            template = " ".join(template.values())
        known = " ".join([template, *getattr(tokenizer, "get_added_vocab", dict)()])
        thinking = list[tuple[str, str]]()
        calls = list[tuple[str, str]]()
        for opening in dict.fromkeys(TAG.findall(known)):
            for closing in (
                f"{opening[0]}/{opening[1:]}",
                opening.replace("begin", "end"),
                opening.replace("start", "end"),
            ):
                if closing != opening and closing in known:
                    kind = calls if "call" in opening.lower() else thinking
                    kind.append((opening, closing))
                    break
        if "<|channel|>" in known and "analysis" in known:
            thinking.append(("<|channel|>analysis", "<|channel|>final"))
        return cls(tuple(thinking), tuple(calls), "tools" in template)


@frozen
class Ending:
    """Properties of the end of one answer."""

    ended: bool
    looped: bool
    # place in the answer's text at which the loop begins, where it is an exact one
    loop_start: int | None
    tokens: int
    repeated: float  # share of its 4-grams that were there before
    open_thinking: bool | None = None  # None where the template knows no thinking
    # a tool call or JSON that is not closed or no JSON; None without a template
    broken_calls: bool | None = None
    other_language: bool | None = None  # than was asked for; None where that is unclear
    refused: bool = False


EndingPair = tuple[Ending, Ending]  # of the base's answer and the smaller model's


def ending_of(
    answer: Answer,
    prompt: Prompt,
    markers: Markers,
    tokenizer: Any,
    before: str = "",
    wanted: Wanted | None = None,
) -> Ending:
    """Measure an answer; `before` is its prompt's text, which may open the thinking, and `wanted`
    the language that it asks for.

    A server's answer without tokens is tokenised anew.
    """
    tokens = answer.tokens[: len(answer.tokens) - (answer.ended == "end")]
    if not answer.tokens:
        tokens = tuple(tokenizer(answer.text, add_special_tokens=False)["input_ids"])
    start = loop_start(tokens)
    letters = None
    if start is not None:  # as letters of the text
        opening = tokenizer.decode(tokens[:start], clean_up_tokenization_spaces=False)
        letters = min(len(opening), len(answer.text))
    last = tokens[-WINDOW:]
    varied = len(last) >= LEAST_WINDOW and repeated_share(last) > 1 - DISTINCT
    whole = before + answer.text
    is_open = [whole.rfind(opening) > whole.rfind(closing) for opening, closing in markers.thinking]
    said = "" if any(is_open) else answer.text
    for _, closing in markers.thinking:
        said = said.rpartition(closing)[2]
    calls = None
    if markers.calls or markers.has_tools:
        calls = broken(answer.text, markers, prompt.tools)
    return Ending(
        ended=answer.ended == "end",
        looped=start is not None or varied,
        loop_start=letters,
        tokens=len(tokens),
        repeated=repeated_share(tokens),
        open_thinking=any(is_open) if is_open else None,
        broken_calls=calls,
        other_language=None if wanted is None else is_in_another(said, wanted),
        refused=refuses(said),
    )


def broken(text: str, markers: Markers, tools: Any = None) -> bool:
    """Return True if a tool call is not closed, or it, or a block of JSON, begins like JSON and is
    none."""
    contents = []
    for opening, closing in markers.calls:
        for call in text.split(opening)[1:]:
            content, end, _ = call.partition(closing)
            if not end:
                return True
            contents.append(content)
    for content, end in FENCE.findall(text):
        if not end:
            return True
        contents.append(content)
    if tools and not contents:
        contents = [text]
    for content in contents:
        if content.strip()[:1] in ("{", "["):
            try:
                json.loads(content)
            except (ValueError, RecursionError):
                return True
    return False


MEASURES: Mapping[str, Callable[[Ending], float | bool | None]] = {
    "loops": lambda ending: ending.looped,
    "missed ends": lambda ending: not ending.ended,
    "open thinking": lambda ending: ending.open_thinking,
    "broken tool calls": lambda ending: ending.broken_calls,
    OTHER_LANGUAGE: lambda ending: ending.other_language,
    REFUSALS: lambda ending: ending.refused,
    "repeated 4-grams": lambda ending: ending.repeated,
    "tokens": lambda ending: float(ending.tokens),
}
NUMBERS = ("repeated 4-grams", "tokens")  # the measures that are no yes or no


@frozen
class Rate:
    """One measure of both models' answers; a rise is the smaller model's less the base's, worse is
    positive."""

    measure: str
    domain: str  # or ALL
    answers: int
    base: float
    smaller: float
    rise: float
    lower: float  # one-sided confidence bounds of the rise
    upper: float
    more: int  # answers with more of it than the base's to the same prompt and seed
    fewer: int
    mcnemar: float | None  # exact two-sided p; None of measures that are no yes or no


def pair_endings(name: str, pairs: Sequence[EndingPair]) -> PairedItems:
    """Pair a measure by prompt and seed, the smaller model first, so that its drop is the measure's
    rise; pairs without such a measure are left out."""
    marks = np.array([[*map(MEASURES[name], pair)] for pair in pairs], dtype=float).reshape(-1, 2)
    base, smaller = marks[~np.isnan(marks).any(1)].T
    return PairedItems(smaller, base, np.ones(len(base)), task=name)


def pair_lengths(pairs: Sequence[EndingPair]) -> PairedItems:
    """Pair lengths by prompt and seed, in units of the base's mean: the drop is the relative rise
    of the mean length.

    An answer without a token counts as one token.
    """
    base = np.array([max(ending.tokens, 1) for ending, _ in pairs], dtype=float)
    smaller = np.array([max(ending.tokens, 1) for _, ending in pairs], dtype=float)
    shares = base / base.mean()
    return PairedItems(smaller / base.mean(), shares, shares, task=LENGTH)


def rates(
    domains: Sequence[str], pairs: Sequence[EndingPair], confidence: float
) -> tuple[Rate, ...]:
    """Return all measures, over all answers and, with several `domains`, by domain."""
    groups = defaultdict[str, list[EndingPair]](list)
    for domain, pair in zip(domains, pairs, strict=True):
        groups[ALL].append(pair)
        groups[domain].append(pair)
    if len(groups) == 2:
        del groups[domains[0]]
    measured = []
    for domain, same in groups.items():
        for name in MEASURES:
            marks = pair_endings(name, same)
            if not len(marks.drops):
                continue
            test = measure(marks, 0.0, 1 - confidence, True)
            rate = Rate(
                measure=name,
                domain=domain,
                answers=test.items,
                base=test.compressed,
                smaller=test.base,
                rise=test.drop,
                lower=test.lower,
                upper=test.upper,
                more=test.lost,
                fewer=test.gained,
                mcnemar=None if name in NUMBERS else test.mcnemar,
            )
            measured.append(rate)
    return tuple(measured)
