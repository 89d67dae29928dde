"""The comparison of two models' behaviour as blocks and as files."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from compressor.answers.generation import Answer
from compressor.document import html
from compressor.document.blocks import (
    Block,
    Facts,
    Heading,
    Marked,
    Note,
    Side,
    Sides,
    Strong,
    Table,
    Text,
    Words,
)
from compressor.document.markdown import markdown
from compressor.files import MADE_BY, write_files
from compressor.formatting import common_prefix, counted
from compressor.quality_gate.behaviour import AnswerPair, Behaviour, Written
from compressor.quality_gate.domain_divergence import divergence_blocks
from compressor.quality_gate.endings import DISTINCT, LEAST, PERIOD, TIMES, WINDOW, Ending, Rate
from compressor.quality_gate.verdict import conditions_table
from compressor.records import plain_json, report_json

NAMES = ("behaviour.json", "behaviour.md", "answers.html", "answers.jsonl")
MOST_PAIRS, MOST_LETTERS = 500, 20_000  # on the page: pairs, and of each text
# on the page, in this order
FIRST = ("new loop", "end missed", "other text", "better", "same text")
DIFFERENCE = re.compile(r"\s*\S*")  # what is marked where two answers part
LEGEND = (
    f"Loops: answers whose end is one sequence of at most {PERIOD} tokens at least {TIMES} times "
    f"over, {LEAST} tokens "
    f"at least, or whose last {WINDOW} tokens have less than {100 * DISTINCT:g}% different "
    "4-grams. Missed ends: "
    "answers that did not end by themselves. Repeated 4-grams: the share of an answer's 4-grams "
    "that occurred before "
    "(seq-rep-4). "
    "At least and at most: one-sided bounds of the rise, paired by prompt and seed, those of "
    "shares of answers exact."
)


def shown(rate: Rate, value: float, sign: str = "") -> str:
    """Return a figure of a measure: a length in tokens, any other in percent."""
    return f"{value:{sign}.1f}" if rate.measure == "tokens" else f"{100 * value:{sign}.2f}%"


def written_blocks(
    written: Written, base: str, smaller: str, confidence: float
) -> tuple[Block, ...]:
    """Return a table of both models' measures, over all answers and by domain."""
    columns = (
        "measure",
        "domain",
        "answers",
        "base",
        "smaller",
        "rise",
        "at least",
        "at most",
        "more / fewer",
    )
    rows = []
    for rate in written.rates:
        figures = [shown(rate, rate.base), shown(rate, rate.smaller)]
        figures += [shown(rate, value, "+") for value in (rate.rise, rate.lower, rate.upper)]
        counts = f"{rate.more:,} / {rate.fewer:,}"
        rows.append((rate.measure, rate.domain, f"{rate.answers:,}", *figures, counts))
    asked = f"{counted(written.prompts, 'prompt')}, {counted(written.seeds, 'answer')} to each"
    caption = (
        f"Answers of {smaller} compared with {base}: {asked}, bounds with confidence "
        f"{100 * confidence:g}% each"
    )
    table = Table(caption, columns, rows, {"domain"}, ("more / fewer", "answers"))
    return table, Text(LEGEND, "note")


def lead(behaviour: Behaviour) -> str:
    """Return the first sentence: loops and ends, or else loss and flips."""
    if behaviour.written is None:
        read = behaviour.text or behaviour.answers
        if read is None:
            return f"{behaviour.smaller} beside {behaviour.base}."
        whole = read.rows[-1]
        what = "this text" if read is behaviour.text else "the base's answers"
        return (
            f"On {what} the loss of {behaviour.smaller} is {whole.loss.change:+.3g} nats per "
            "token beside that of "
            f"{behaviour.base}, and {100 * whole.flips.change:.3g}% of the greedy tokens are "
            "others."
        )
    loops, missed = behaviour.written.rates[:2]
    return (
        f"{behaviour.smaller} loops in {shown(loops, loops.smaller)} of its answers, "
        f"{behaviour.base} in "
        f"{shown(loops, loops.base)}; it misses its end in {shown(missed, missed.smaller)}, the "
        "base in "
        f"{shown(missed, missed.base)}."
    )


def behaviour_blocks(behaviour: Behaviour, written: Sequence[Path] = ()) -> list[Block]:
    """Return all figures, the same for a terminal and for behaviour.md."""
    blocks: list[Block] = [Text(Strong(lead(behaviour)))]
    if behaviour.written is not None:
        blocks += written_blocks(
            behaviour.written, behaviour.base, behaviour.smaller, behaviour.confidence
        )
    if behaviour.text is not None:
        title = f"Divergence of {behaviour.smaller} from {behaviour.base} on text"
        blocks += divergence_blocks(behaviour.text, title)
    if behaviour.answers is not None:
        blocks += divergence_blocks(
            behaviour.answers, f"Divergence of {behaviour.smaller} on answers by {behaviour.base}"
        )
    if behaviour.conditions:
        blocks.append(conditions_table(behaviour.conditions))
    if written:
        blocks.append(
            Text(f"Written to {written[0].parent}: {', '.join(path.name for path in written)}.")
        )
    return blocks


def answer_lines(pairs: Iterable[AnswerPair]) -> str:
    """Return each pair of answers as a line of JSON, without the prompt's file."""
    plain = (replace(pair, prompt=replace(pair.prompt, where="")) for pair in pairs)
    return "".join(
        json.dumps({"verdict": pair.verdict, **plain_json(pair)}) + "\n" for pair in plain
    )


def marked(text: str, other: str, ending: Ending) -> Words:
    """Return an answer with the first word that differs and its loop marked."""
    text = text[:MOST_LETTERS]
    loop = len(text) if ending.loop_start is None else ending.loop_start
    begin = common_prefix(text, other)
    match = DIFFERENCE.match(text, begin)
    assert match is not None, "nothing is matched, too"
    begin = min(begin, loop)
    end = min(match.end(), loop)
    words = list[Words]([text[:begin]])
    if begin < end and text != other:
        words.append(Marked(text[begin:end], "difference"))
    else:
        end = begin
    words.append(text[end:loop])
    if loop < len(text):
        words.append(Marked(text[loop:], "loop"))
    return tuple(words)


def answers_page(behaviour: Behaviour) -> str:
    """Return a page with both answers to each prompt side by side, new loops and missed ends
    first."""
    assert behaviour.written is not None, "a page of answers has answers"
    pairs = sorted(behaviour.written.pairs, key=lambda pair: FIRST.index(pair.verdict))

    def side(name: str, answer: Answer, other: Answer, ending: Ending) -> tuple[str, Words]:
        ends = "ended by itself" if ending.ended else "no end"
        title = (
            f"{name}: {counted(ending.tokens, 'token')}, {ends}{', loops' if ending.looped else ''}"
        )
        return title, marked(answer.text, other.text, ending)

    sides = []
    for pair in pairs[:MOST_PAIRS]:
        texts = (
            side(behaviour.base, pair.base, pair.smaller, pair.base_ending),
            side(behaviour.smaller, pair.smaller, pair.base, pair.smaller_ending),
        )
        title = (pair.verdict, " ", Note(f"{pair.prompt.domain}, seed {pair.seed}"))
        sides.append(
            Side(title, pair.prompt.shown[:MOST_LETTERS], texts, (pair.prompt.domain, pair.verdict))
        )
    left_out = len(pairs) - len(sides)
    more = f" {left_out:,} more pairs are in {NAMES[3]} alone." if left_out else ""
    note = Text(f"Underlined: the first word that differs. Coloured: a loop.{more}", "note")
    document: list[Block] = [Heading("Measures", 2, "measures"), *behaviour_blocks(behaviour)[1:]]
    document += [
        Heading("Answers side by side", 2, "answers"),
        note,
        Sides(("Domain", "Verdict"), sides),
    ]
    counts = Counter(pair.verdict for pair in pairs)
    tiles = Facts([(name.capitalize(), f"{counts[name]:,}") for name in FIRST])
    return html.page(
        behaviour.smaller,
        "Behaviour report",
        lead(behaviour),
        tiles,
        document,
        f"{MADE_BY} evaluate.",
    )


def write_behaviour(behaviour: Behaviour, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write JSON, Markdown, the answers and a page to read them into a new folder, or nothing when
    anything fails."""
    page = markdown(
        (Heading(f"Behaviour of {behaviour.smaller}", level=1), *behaviour_blocks(behaviour))
    )
    texts = [report_json(behaviour.to_dict()), page]
    if behaviour.written is not None:
        texts += [answers_page(behaviour), answer_lines(behaviour.written.pairs)]
    return write_files(folder, dict(zip(NAMES, texts, strict=False)), NAMES, overwrite)
