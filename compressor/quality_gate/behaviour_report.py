"""The comparison of two models' behaviour as blocks and as files."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
from compressor.quality_gate.behaviour import Behaviour
from compressor.quality_gate.domain_divergence import divergence_blocks
from compressor.quality_gate.endings import DISTINCT, LEAST, PERIOD, TIMES, WINDOW, Ending, Rate
from compressor.quality_gate.options import OTHER_LANGUAGE
from compressor.quality_gate.verdict import conditions_table
from compressor.records import plain_json, report_json

NAMES = ("behaviour.json", "behaviour.md", "answers.html", "answers.jsonl")
MOST_PAIRS, MOST_LETTERS = 500, 20_000  # on the page: pairs, and of each text
# on the page, in this order
FIRST = (
    *("new loop", "end missed", OTHER_LANGUAGE, "new refusal"),
    *("other text", "better", "same text"),
)
DIFFERENCE = re.compile(r"\s*\S*")  # what is marked where two answers part
COLUMNS = (
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
LEGEND = (
    f"Loops: answers whose end is one sequence of at most {PERIOD} tokens at least {TIMES} times "
    f"over, {LEAST} tokens at least, or whose last {WINDOW} tokens have less than "
    f"{100 * DISTINCT:g}% different 4-grams. Missed ends: answers that did not end by themselves. "
    "Other language: answers, thinking apart, that are very unlikely to be in a language or script "
    "that the prompt has or names. Refusals: answers that open with one. Repeated 4-grams: the "
    "share of an answer's 4-grams that occurred before (seq-rep-4). At least and at most: "
    "one-sided bounds of the rise, paired by prompt and seed, those of shares of answers exact."
)


def shown(rate: Rate, value: float, sign: str = "") -> str:
    """Return a figure of a measure: a length in tokens, any other in percent."""
    return f"{value:{sign}.1f}" if rate.measure == "tokens" else f"{100 * value:{sign}.2f}%"


def lead(behaviour: Behaviour) -> str:
    """Return the first sentence: loops and ends, or else loss and flips."""
    if behaviour.written is None:
        read = behaviour.text or behaviour.answers
        if read is None:
            return f"{behaviour.smaller} beside {behaviour.base}."
        whole = read.rows[-1]
        what = "this text" if read is behaviour.text else "the base's answers"
        return (
            f"On {what} the loss of {behaviour.smaller} is {whole.loss.change:+.3g} nats per token "
            f"beside that of {behaviour.base}, and {100 * whole.flips.change:.3g}% of the greedy "
            "tokens are others."
        )
    loops, missed = behaviour.written.rates[:2]
    return (
        f"{behaviour.smaller} loops in {shown(loops, loops.smaller)} of its answers, "
        f"{behaviour.base} in {shown(loops, loops.base)}; it misses its end in "
        f"{shown(missed, missed.smaller)}, the base in {shown(missed, missed.base)}."
    )


def behaviour_blocks(behaviour: Behaviour, files: Sequence[Path] = ()) -> list[Block]:
    """Return all figures, the same for a terminal and for behaviour.md."""
    blocks: list[Block] = [Text(Strong(lead(behaviour)))]
    written = behaviour.written
    if written is not None:
        rows = []
        for rate in written.rates:
            figures = [shown(rate, rate.base), shown(rate, rate.smaller)]
            figures += [shown(rate, value, "+") for value in (rate.rise, rate.lower, rate.upper)]
            counts = f"{rate.more:,} / {rate.fewer:,}"
            rows.append((rate.measure, rate.domain, f"{rate.answers:,}", *figures, counts))
        asked = f"{counted(written.prompts, 'prompt')}, {counted(written.seeds, 'answer')} to each"
        caption = (
            f"Answers of {behaviour.smaller} compared with {behaviour.base}: {asked}, bounds with "
            f"confidence {100 * behaviour.confidence:g}% each"
        )
        blocks.append(Table(caption, COLUMNS, rows, {"domain"}, ("more / fewer", "answers")))
        blocks.append(Text(LEGEND, "note"))
    divergence = f"Divergence of {behaviour.smaller} from {behaviour.base} on text"
    if behaviour.text is not None:
        blocks += divergence_blocks(behaviour.text, divergence)
    if behaviour.answers is not None:
        divergence = f"Divergence of {behaviour.smaller} on answers by {behaviour.base}"
        blocks += divergence_blocks(behaviour.answers, divergence)
    if behaviour.conditions:
        blocks.append(conditions_table(behaviour.conditions))
    if files:
        names = ", ".join(path.name for path in files)
        blocks.append(Text(f"Written to {files[0].parent}: {names}."))
    return blocks


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


def write_behaviour(behaviour: Behaviour, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write JSON, Markdown, the answers and a page to read them into a new folder, or nothing when
    anything fails.

    The page has both answers to each prompt side by side, new loops and missed ends first."""
    blocks = behaviour_blocks(behaviour)
    heading = Heading(f"Behaviour of {behaviour.smaller}", level=1)
    texts = [report_json(behaviour.to_dict()), markdown((heading, *blocks))]
    if behaviour.written is not None:
        lines = []
        for pair in behaviour.written.pairs:
            shown_pair = replace(pair, prompt=replace(pair.prompt, where=""))
            lines.append(json.dumps({"verdict": pair.verdict, **plain_json(shown_pair)}) + "\n")
        pairs = sorted(behaviour.written.pairs, key=lambda pair: FIRST.index(pair.verdict))
        sides = []
        for pair in pairs[:MOST_PAIRS]:
            answers = []
            for name, answer, other, ending in (
                (behaviour.base, pair.base, pair.smaller, pair.base_ending),
                (behaviour.smaller, pair.smaller, pair.base, pair.smaller_ending),
            ):
                ends = "ended by itself" if ending.ended else "no end"
                loops = ", loops" if ending.looped else ""
                title = f"{name}: {counted(ending.tokens, 'token')}, {ends}{loops}"
                answers.append((title, marked(answer.text, other.text, ending)))
            domain = pair.prompt.domain
            side_heading = (pair.verdict, " ", Note(f"{domain}, seed {pair.seed}"))
            shown_prompt = pair.prompt.shown[:MOST_LETTERS]
            sides.append(Side(side_heading, shown_prompt, tuple(answers), (domain, pair.verdict)))
        left_out = len(pairs) - len(sides)
        more = f" {left_out:,} more pairs are in {NAMES[3]} alone." if left_out else ""
        note = Text(f"Underlined: the first word that differs. Coloured: a loop.{more}", "note")
        document: list[Block] = [
            Heading("Measures", 2, "measures"),
            *blocks[1:],
            Heading("Answers side by side", 2, "answers"),
            note,
            Sides(("Domain", "Verdict"), sides),
        ]
        counts = Counter(pair.verdict for pair in pairs)
        tiles = Facts([(name.capitalize(), f"{counts[name]:,}") for name in FIRST])
        made_by = f"{MADE_BY} evaluate."
        page = html.page(
            behaviour.smaller, "Behaviour report", lead(behaviour), tiles, document, made_by
        )
        texts += [page, "".join(lines)]
    return write_files(folder, dict(zip(NAMES, texts, strict=False)), NAMES, overwrite)
