"""Says whether answers are a model's own, the model's up to some kind of rounding, or another
model's.

Rounding moves all answers by about as much as the same kind of rounding did when the golden answers
were written. A fault moves them further, or only those that it reaches. Where two experts are
nearly tied, rounding may exchange them: so the median counts, and a few answers may be far off."""

from collections.abc import Sequence
from math import inf, isfinite
from statistics import median
from typing import Literal

from compressor.document.blocks import Block, Facts, Text
from compressor.frozen import frozen
from compressor.golden.answers import GoldenAnswers, Top
from compressor.model.opened import OpenModel

EXACT = 1e-4  # nats: what float32 and the digits of the file leave open
UNTOUCHED = 2e-5  # nats: a smaller distance is none
FAR = 4.0  # times a band: an answer that is far off
MOST_FAR = 0.06  # of the answers, where experts are nearly tied
MOST_FAR_IN_DECODING = 0.5  # of those few that come after new tokens
EVEN = 0.25  # of the median that nine tenths of the answers reach
MEANING = {  # by band, the narrowest first
    "float32": "computes this model",
    "bfloat16": "computes this model, up to rounding as bfloat16 does",
    "8-bit": "computes this model, up to rounding as 8-bit weights would",
    "fp8": "computes this model, up to rounding as 8-bit weights and activations would (fp8)",
    "4-bit": "computes this model, up to rounding as 4-bit weights would",
}
KINDS = tuple(MEANING)
# times a band: activations may be rounded, too
LEVELS = {kind: 1.5 if kind == "4-bit" else 1.8 for kind in KINDS}
LEAST_COMPARED = 0.5  # of the answers
TOKENS = "its chat template, or its tokenizer, makes other tokens of the same text"
CACHE = "answers after new tokens differ, and those to prompts do not: look at its key-value cache"


@frozen
class Answered:
    """What was asked, and its answers."""

    label: str
    top: Sequence[Top | None]  # by position, over all prompts; None where it was not asked
    widest: str  # band that its number format allows
    other_tokens: Sequence[int] = ()  # numbers of prompts of which it makes other tokens
    # in the tokens that it names, where these are not all
    golden: Sequence[Top | None] | None = None
    asked: int = 0  # positions, if not all
    unanswered: int = 0  # of these
    model: OpenModel | None = None  # that was asked, if it is a checkpoint


@frozen
class Verdict:
    """What a comparison with golden answers says."""

    label: str
    verdict: Literal["same", "same up to rounding", "different"]
    band: str | None  # the narrowest that holds it; None if it is different
    distance: float  # nats: the median over all positions
    largest: float
    allowed: float  # the largest median distance, by the widest band that counts here
    widest: str
    prompt: int  # where it is largest
    position: int
    other_tokens: tuple[int, ...]
    compared: int  # answers
    asked: int
    cause: str | None = None
    stock: str | None = None  # how stock transformers, unlike this reader, mistreats the checkpoint

    @property
    def blocks(self) -> list[Block]:
        """The verdict for people."""
        facts = {
            "distance": f"{self.distance:.5f} nats (median of a top token's log-probability)",
            "largest": f"{self.largest:.5f}, after token {self.position + 1} of prompt "
            f"{self.prompt + 1}",
            "allowed": f"{self.allowed:.5f} ({self.widest})",
        }
        if self.cause is not None:
            facts["likeliest cause"] = self.cause
        if self.stock is not None:
            facts["elsewhere"] = self.stock
        return [Text(self.sentence), Facts(tuple(facts.items()))]

    @property
    def sentence(self) -> str:
        compared = f"{self.compared} of {self.asked} answers compared"
        if self.band is not None:
            return f"{self.label} {MEANING[self.band]} ({compared})."
        return f"{self.label} is different: it does not answer as this model does ({compared})."


def limits_of(golden: GoldenAnswers, kind: str) -> list[float]:
    """Return how far a kind of rounding may move each answer, and at least as far as it moves the
    median one."""
    moved = golden.bands.get(kind, [0.0] * len(golden.top))
    typical = max(median(moved), EXACT)
    return [max(distance, typical) for distance in moved]


def is_even(distances: Sequence[float], limits: Sequence[float]) -> bool:
    """Return True if nine tenths of the answers are moved, and not much less than the median
    one."""
    shares = sorted(distance / limit for distance, limit in zip(distances, limits, strict=True))
    tenth = len(shares) // 10
    return sorted(distances)[tenth] > UNTOUCHED and shares[tenth] >= EVEN * median(shares)


def compare(golden: GoldenAnswers, answered: Answered) -> Verdict:
    """Return the verdict on answers, by the narrowest band that holds them."""
    # by number of the answer
    distances = {
        number: first.distance(second)
        for number, (first, second) in enumerate(
            zip(answered.golden or golden.top, answered.top, strict=True)
        )
        if first is not None and second is not None
    }
    decoded = golden.decoded & distances.keys()
    finite = {number: distance for number, distance in distances.items() if isfinite(distance)}
    asked = answered.asked or len(golden.top)
    band = None
    cause = None
    if answered.other_tokens:
        cause = TOKENS
    elif len(finite) < len(distances):
        cause = f"{len(distances) - len(finite)} of its answers are no finite numbers"
    elif answered.unanswered:
        cause = f"it left {answered.unanswered} of {asked} answers out"
    elif len(finite) < LEAST_COMPARED * asked:
        cause = (
            "most of its answers name too few tokens by id or by a text of their own to "
            "compare them"
        )
    direct = sorted(distances.keys() - decoded)
    moved = [distances[number] for number in direct]
    for kind in () if cause else KINDS[: 1 + KINDS.index(answered.widest)]:
        limits = limits_of(golden, kind)
        allowed = [limits[number] for number in direct]
        far = {number for number in distances if distances[number] > FAR * limits[number]}
        most_far = MOST_FAR * len(direct)
        if kind == "float32":
            most_far = 0
        else:
            # two that are not exact may round alike
            is_rounding = golden.dtype != "float32" or is_even(moved, allowed)
            if not is_rounding or median(moved) > LEVELS[kind] * median(allowed):
                continue
        if len(far - decoded) > most_far:
            continue
        if len(far & decoded) <= MOST_FAR_IN_DECODING * len(decoded):
            band = kind
            cause = None
            break
        cause = CACHE
    worst = max(distances, key=lambda number: finite.get(number, inf))
    prompt, position = golden.places[worst]
    verdict: Literal["same", "same up to rounding", "different"] = "different"
    if band is not None:
        verdict = "same" if band == "float32" else "same up to rounding"
    return Verdict(
        label=answered.label,
        verdict=verdict,
        band=band,
        distance=median(finite.get(number, inf) for number in distances),
        largest=distances[worst],
        allowed=LEVELS[answered.widest] * median(limits_of(golden, answered.widest)),
        widest=answered.widest,
        prompt=prompt,
        position=position,
        other_tokens=tuple(answered.other_tokens),
        compared=len(finite),
        asked=asked,
        cause=cause,
    )


def widest_band(bits: float) -> str:
    """Return the widest band that weights of so many bits allow."""
    if bits >= 15:
        return "bfloat16"
    return "8-bit" if bits > 7 else "4-bit"
