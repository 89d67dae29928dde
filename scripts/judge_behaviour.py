"""Measure how half a model's experts loop and end, by method and by calibration text, and what foretells it.

    python -m scripts.train_answers_model --output answers
    python -m scripts.judge_behaviour answers -o work

Each variant answers held-out prompts greedily, as the base does, and reads the base's answers under teacher forcing.
Prints loops and missed ends with the exact paired bounds of their rise; what traces and emphasis change; missed ends by
domain; how well what was read foretells what was written, over the prompts of a variant by the area under the ROC curve
(AUC), over variants by rank correlation; and which domains are named after calibrating without one. A run that was
killed goes on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, spearmanr

from compressor import compress, evaluate, traces
from compressor.answers.options import AnswerOptions
from compressor.quality_gate.behaviour import Behaviour
from compressor.quality_gate.domain_divergence import DomainFigures
from compressor.quality_gate.endings import ALL, Ending, Rate, rates
from compressor.quality_gate.options import BehaviourOptions
from compressor.recipe.step import TextOptions
from scripts.answers_texts import DOMAINS
from scripts.benchmarks.frame import head, options, row
from scripts.train_demo_model import write_lines

ALONE, RIDGE, DEFAULT = "REAP alone", "REAP, ridge", "default"
METHODS: dict[str, dict[str, Any]] = {
    ALONE: {"strategy": "reap", "correct": "none", "split": 1},
    RIDGE: {"strategy": "reap", "correct": "ridge", "split": 1},
    DEFAULT: {},
}
EMPHASIS = {"end": 8, "think_end": 8}
TEXTS = {"plain text": "plain", "prompts": "questions", "traces": "traces"}
VARIANTS = (  # share of experts that goes, method, calibration text, emphasis
    *((share, ALONE, "traces", None) for share in (0.125, 0.25)),
    *((0.5, ALONE, text, None) for text in TEXTS),
    *((0.5, RIDGE, "traces", emphasis) for emphasis in (None, EMPHASIS)),
    *((0.5, DEFAULT, text, None) for text in TEXTS),
    *((0.5, DEFAULT, text, EMPHASIS) for text in ("prompts", "traces")),
    *((0.75, DEFAULT, text, None) for text in TEXTS),
    (0.75, DEFAULT, "traces", EMPHASIS),
)
PREDICTORS = ("P(end)", "KL", "flips")  # of the base's answers under teacher forcing
ENDS = ("loops", "missed ends")
RESAMPLED = 1000
ROWS = 64  # answers that are written together


@dataclass(frozen=True, slots=True)
class Variant:
    """A smaller model: what it wrote, and what it made of the base's answers."""

    share: float
    name: str
    text: str
    found: Behaviour

    def rate(self, measure: str, domain: str = ALL) -> Rate:
        """A measure of its answers beside the base's."""
        assert self.found.written is not None
        return next(each for each in self.found.written.rates if (each.measure, each.domain) == (measure, domain))

    @property
    def endings(self) -> list[Ending]:
        """How its answers end."""
        assert self.found.written is not None
        return [each.smaller_ending for each in self.found.written.pairs]

    @property
    def read(self) -> DomainFigures:
        """What it made of the base's answers."""
        assert self.found.answers is not None and self.found.answers.together is not None
        return self.found.answers.together

    def foretold(self) -> tuple[NDArray[np.bool_], dict[str, NDArray[np.float64]]]:
        """Of each prompt whose base's answer ends: whether its own loops or does not end, and each predictor of it."""
        assert self.found.written is not None
        endings = {each.prompt.id: each.smaller_ending for each in self.found.written.pairs}
        rows = [(endings[each.id], -each.end[1], each.kl, each.flips) for each in self.found.each if each.end]
        bad = np.array([ending.looped or not ending.ended for ending, *_ in rows])
        return bad, dict(zip(PREDICTORS, np.array([row[1:] for row in rows]).T, strict=True))


def area(bad: NDArray[np.bool_], score: NDArray[np.float64]) -> float:
    """Probability that a bad answer has a higher score than a good one, ties counted half: [n], [n]."""
    count = int(bad.sum())
    return float((rankdata(score)[bad].sum() - count * (count + 1) / 2) / (count * (len(bad) - count)))


def area_with_bounds(bad: NDArray[np.bool_], score: NDArray[np.float64]) -> str:
    """The area with the 5th and 95th percentile over resampled prompts."""
    if not 0 < bad.sum() < len(bad):
        return "-"
    draws = np.random.default_rng(0).integers(len(bad), size=(RESAMPLED, len(bad)))
    areas = [area(bad[own], score[own]) for own in draws if 0 < bad[own].sum() < len(bad)]
    low, high = np.quantile(areas, (0.05, 0.95))
    return f"{area(bad, score):.2f} ({low:.2f} to {high:.2f})"


def risen(rate: Rate) -> str:
    """A rise with its bounds, in points."""
    return f"{100 * rate.smaller:.1f}% ({100 * rate.lower:+.1f} to {100 * rate.upper:+.1f})"


def main() -> None:
    """Make and judge all variants, then print the tables."""
    parser = options(
        __doc__, samples=128, length=512, prompts=80, traced=1000, new_tokens=256, seed=0, without=["code", "thinking"]
    )
    parser.add_argument("answers", type=Path, help="folder that scripts.train_answers_model has written")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    base, cache = str(args.answers / "checkpoint"), args.out / "cache"
    files = {text: args.answers / f"{name}.jsonl" for text, name in TEXTS.items()}
    files["traces"] = args.out / "traces.jsonl"
    if not files["traces"].exists():
        questions = (str(args.answers / "questions.jsonl"),)
        sampled = AnswerOptions(prompts=questions, max_new_tokens=args.new_tokens, temperature=1.0)
        traces(base, sampled, files["traces"], limit=args.traced, batch_size=ROWS)
    named = [f"{args.answers}/prompts-{domain}.jsonl={domain}" for domain in DOMAINS]
    answering = BehaviourOptions(prompts=tuple(named), max_new_tokens=args.new_tokens)
    variants = list[Variant]()
    for share, method, text, emphasis in VARIANTS:
        name = f"{method}, emphasis" if emphasis else method
        folder = args.out / f"{share} {name} {text}".replace(", ", "-").replace(" ", "-")
        sizes = {"samples": args.samples, "sequence_length": args.length}
        calibration = TextOptions.model_validate({"data": str(files[text]), "emphasis": emphasis, **sizes})
        compress(base, folder, ratio=share, calibration=calibration, seed=args.seed, **METHODS[method])
        found = evaluate(base, str(folder), answering, limit=args.prompts, batch_size=ROWS, cache=cache)
        variants.append(Variant(share, name, text, found))
        report(variants[-1], first=len(variants) == 1)
    report_pairs(variants)
    report_domains(variants)
    report_foretelling(variants)
    report_missing(base, args)


def report(variant: Variant, first: bool) -> None:
    """Print a variant's row, after the head and the base's if it is the first."""
    both = [variant.rate(name) for name in ENDS]
    end = variant.read.stop_tokens[0].here
    assert end is not None
    if first:
        head("experts gone", "method", "calibration", "loops", "missed ends", "P(end)", "flips", "KL")
        row("0%", "the base", "", *(f"{each.base:.1%}" for each in both), end.base, "", "")
    flips, kl = f"{variant.read.flips.compressed:.1%}", variant.read.kl.compressed
    row(f"{variant.share:.3g}", variant.name, variant.text, *map(risen, both), end.compressed, flips, kl)


def report_domains(variants: Sequence[Variant]) -> None:
    """Print the missed ends of each domain."""
    print()
    head("experts gone", "method", "calibration", *(f"missed ends, {domain}" for domain in DOMAINS))
    for each in variants:
        rises = (risen(each.rate("missed ends", domain)) for domain in DOMAINS)
        row(f"{each.share:.3g}", each.name, each.text, *rises)


def report_pairs(variants: Sequence[Variant]) -> None:
    """Print what traces and emphasis change beside the same variant without them, paired by prompt."""
    print()
    head("experts gone", "method", "from", "to", "rise of loops", "rise of missed ends")
    known = {(each.share, each.name, each.text): each for each in variants}
    for (share, name, text), one in known.items():
        for changed in ((share, name, "traces"), (share, f"{name}, emphasis", text)):
            if (other := known.get(changed, one)) is not one:
                found = rates(["all"] * len(one.endings), one.endings, other.endings, one.found.confidence)
                rises = [next(each for each in found if each.measure == measure) for measure in ENDS]
                shown = (f"{100 * x.rise:+.1f} ({100 * x.lower:+.1f} to {100 * x.upper:+.1f})" for x in rises)
                row(f"{share:.3g}", name, text, changed[2] if changed[2] != text else "emphasis", *shown)


def report_missing(base: str, args: Any) -> None:
    """Print the rise of loss and the KL on each domain after calibrating without one, and which domains are named."""
    print()
    head("calibration without", *(f"{domain}: loss, KL" for domain in DOMAINS), "named")
    texts = tuple(f"{args.answers}/heldout-{domain}.jsonl={domain}" for domain in DOMAINS)
    rows = [json.loads(line) for line in (args.answers / "chats.jsonl").read_text().splitlines()]
    for missing in ("none", *args.without):
        folder = args.out / f"without-{missing}"
        file = args.out / f"without-{missing}.jsonl"
        write_lines(file, [each for each in rows if each["domain"] != missing])
        text = TextOptions(data=(str(file),), samples=args.samples, sequence_length=args.length)
        compress(base, folder, ratio=0.5, calibration=text, seed=args.seed, **METHODS[DEFAULT])
        found = evaluate(base, str(folder), BehaviourOptions(text=texts)).text
        assert found is not None
        named = ", ".join(each.domain for each in found.degraded)
        row(missing, *(f"{each.loss.change:+.3f}, {each.kl.change:.3f}" for each in found.domains), named or "none")


def report_foretelling(variants: Sequence[Variant]) -> None:
    """Print how well each predictor under teacher forcing sorts prompts and variants."""
    print()
    head("experts gone", "method", "calibration", "loops or no end", *(f"AUC of {name}" for name in PREDICTORS))
    means = []
    for each in variants:
        bad, scores = each.foretold()
        areas = (area_with_bounds(bad, scores[name]) for name in PREDICTORS)
        row(f"{each.share:.3g}", each.name, each.text, f"{bad.sum()} of {len(bad)}", *areas)
        means.append([bad.mean(), *(scores[name].mean() for name in PREDICTORS)])
    share, *others = np.array(means).T
    row("", "rank correlation over variants", "", "", *(float(spearmanr(share, other).statistic) for other in others))


if __name__ == "__main__":
    main()
