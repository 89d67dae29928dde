"""What was found of two models' behaviour: as blocks, and as files."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from compressor.document import html
from compressor.document.blocks import Block, Facts, Heading, Marked, Note, Side, Sides, Strong, Table, Text, Words
from compressor.document.markdown import markdown
from compressor.evaluation.behaviour import Behaviour, Pair, Written
from compressor.evaluation.conditions import conditions_table
from compressor.evaluation.endings import DISTINCT, LEAST, PERIOD, TIMES, WINDOW, Ending, Rate
from compressor.evaluation.gate_report import LONE_HALVES
from compressor.evaluation.judged import judged_blocks
from compressor.files import MADE_BY, whole_folder
from compressor.formatting import counted
from compressor.records import plain_json

NAMES = ("behaviour.json", "behaviour.md", "answers.html", "answers.jsonl")
MOST_PAIRS, MOST_LETTERS = 500, 20_000  # on the page: pairs, and of each text
FIRST = ("new loop", "end missed", "other text", "better", "same text")  # on the page, in this order
DIFFERENCE = re.compile(r"\s*\S*")  # what is marked where two answers part
LEGEND = (
    f"Loops: answers whose end is one sequence of at most {PERIOD} tokens at least {TIMES} times over, {LEAST} tokens "
    f"at least, or whose last {WINDOW} tokens have less than {100 * DISTINCT:g}% different 4-grams. Missed ends: those "
    "that did not end by themselves. Repeated 4-grams: the share of an answer's that were there before (seq-rep-4). "
    "At least and at most: one-sided bounds of the rise, paired by prompt and seed, those of shares of answers exact."
)


def shown(rate: Rate, value: float, sign: str = "") -> str:
    """A figure of a measure: of a length in tokens, of all others in percent."""
    return f"{value:{sign}.1f}" if rate.measure == "tokens" else f"{100 * value:{sign}.2f}%"


def written_blocks(written: Written, base: str, smaller: str, confidence: float) -> tuple[Block, ...]:
    """The measures of both models, over all answers and by domain."""
    columns = ("measure", "domain", "answers", "base", "smaller", "rise", "at least", "at most", "more / fewer")
    rows: tuple[tuple[Words, ...], ...] = tuple(
        (
            rate.measure,
            rate.domain,
            f"{rate.answers:,}",
            *(shown(rate, value) for value in (rate.base, rate.smaller)),
            *(shown(rate, value, "+") for value in (rate.rise, rate.lower, rate.upper)),
            f"{rate.more:,} / {rate.fewer:,}",
        )
        for rate in written.rates
    )
    asked = f"{counted(written.prompts, 'prompt')}, {counted(written.seeds, 'answer')} to each"
    caption = f"What {smaller} writes compared with {base}: {asked}, bounds with confidence {100 * confidence:g}% each"
    return Table(caption, columns, rows, frozenset({"domain"}), ("more / fewer", "answers")), Text(LEGEND, "note")


def lead(found: Behaviour) -> str:
    """The first sentence: loops and ends."""
    if found.written is None:
        if (read := found.text or found.answers) is None:
            return f"{found.smaller} beside {found.base}."
        whole, what = read.rows[-1], "this text" if read is found.text else "the base's answers"
        return (
            f"On {what} the loss of {found.smaller} is {whole.loss.change:+.3g} nats per token beside that of "
            f"{found.base}, and {100 * whole.flips.change:.3g}% of the greedy tokens are others."
        )
    loops, missed = found.written.rates[:2]
    return (
        f"{found.smaller} loops in {shown(loops, loops.smaller)} of its answers, {found.base} in "
        f"{shown(loops, loops.base)}; it misses its end in {shown(missed, missed.smaller)}, the base in "
        f"{shown(missed, missed.base)}."
    )


def behaviour_blocks(found: Behaviour, written: Sequence[Path] = ()) -> tuple[Block, ...]:
    """All that was found, the same on a terminal and in behaviour.md."""
    blocks: list[Block] = [Text(Strong(lead(found)))]
    if found.written is not None:
        blocks += written_blocks(found.written, found.base, found.smaller, found.confidence)
    if found.text is not None:
        blocks += judged_blocks(found.text, f"What {found.smaller} makes of text compared with {found.base}")
    if found.answers is not None:
        blocks += judged_blocks(found.answers, f"What {found.smaller} makes of answers by {found.base}")
    if found.conditions:
        blocks.append(conditions_table(found.conditions))
    if written:
        blocks.append(Text(f"Written to {written[0].parent}: {', '.join(path.name for path in written)}."))
    return tuple(blocks)


def answer_lines(pairs: Iterable[Pair]) -> str:
    """Each pair of answers as a line of JSON, which names no folder."""
    plain = (replace(pair, prompt=replace(pair.prompt, where="")) for pair in pairs)
    return "".join(json.dumps({"verdict": pair.verdict, **plain_json(pair)}) + "\n" for pair in plain)


def marked(text: str, other: str, ending: Ending) -> Words:
    """An answer with the word at which it parts from the other, and its loop, set off."""
    text = text[:MOST_LETTERS]
    parts = next(
        (n for n, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), min(len(text), len(other))
    )
    found = DIFFERENCE.match(text, parts)
    assert found is not None, "nothing is matched, too"
    stop = len(text) if ending.loop_start is None else ending.loop_start
    end = found.end() if text != other else parts
    begin, end = min(parts, stop), min(end, stop)
    difference = (Marked(text[begin:end], "difference"),) if begin < end else ()
    loop = (Marked(text[stop:], "loop"),) if stop < len(text) else ()
    return (text[:begin], *difference, text[end:stop], *loop)


def answers_page(found: Behaviour) -> str:
    """A page with both answers to each prompt side by side, those that tell most first."""
    assert found.written is not None, "a page of answers has answers"
    pairs = sorted(found.written.pairs, key=lambda pair: FIRST.index(pair.verdict))
    sides = []
    for pair in pairs[:MOST_PAIRS]:
        texts = []
        for name, own, other, ending in (
            (found.base, pair.base, pair.smaller, pair.base_ending),
            (found.smaller, pair.smaller, pair.base, pair.smaller_ending),
        ):
            ends = "ended by itself" if ending.ended else "no end"
            said = f"{name}: {counted(ending.tokens, 'token')}, {ends}{', loops' if ending.looped else ''}"
            texts.append((said, marked(own.text, other.text, ending)))
        title = (pair.verdict, " ", Note(f"{pair.prompt.domain}, seed {pair.seed}"))
        sides.append(Side(title, pair.prompt.shown[:MOST_LETTERS], tuple(texts), (pair.prompt.domain, pair.verdict)))
    left_out = len(pairs) - len(sides)
    more = f" {left_out:,} more pairs are in {NAMES[3]} alone." if left_out else ""
    note = Text(f"Underlined: the first word that differs. Coloured: a loop.{more}", "note")
    document: list[Block] = [Heading("Measures", 2, "measures"), *behaviour_blocks(found)[1:]]
    document += [Heading("Answers side by side", 2, "answers"), note, Sides(("Domain", "Verdict"), tuple(sides))]
    counts = Counter(pair.verdict for pair in pairs)
    tiles = Facts(tuple((name.capitalize(), f"{counts[name]:,}") for name in FIRST))
    return html.page(found.smaller, "Behaviour report", lead(found), tiles, document, f"{MADE_BY} evaluate.")


def write_behaviour(found: Behaviour, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write JSON, Markdown, the answers and a page to read them into a new folder, or nothing when anything fails."""
    with whole_folder(folder, NAMES, overwrite) as made:
        content = json.dumps(found.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        (made / NAMES[0]).write_text(content, encoding="utf-8", errors=LONE_HALVES)
        page = markdown((Heading(f"Behaviour of {found.smaller}", level=1), *behaviour_blocks(found)))
        (made / NAMES[1]).write_text(page, encoding="utf-8", errors=LONE_HALVES)
        if found.written is not None:
            (made / NAMES[2]).write_text(answers_page(found), encoding="utf-8", errors=LONE_HALVES)
            (made / NAMES[3]).write_text(answer_lines(found.written.pairs), encoding="utf-8", errors=LONE_HALVES)
    return [folder / name for name in NAMES if (folder / name).exists()]
