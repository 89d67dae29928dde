"""Says whether answers are a model's own, the model's up to some kind of rounding, or another model's.

Rounding moves all answers by about as much as the same kind of rounding did when the golden answers were written. A
fault moves them further, or only those that it reaches. Where two experts are nearly tied, rounding may exchange them:
so the median counts, and a few answers may be far off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from compressor.document.blocks import Block, Facts, Text
from compressor.golden.answers import BANDS, GoldenAnswers, Top

EXACT = 1e-4  # nats: what float32 and the digits of the file leave open
UNTOUCHED = 2e-5  # nats: a smaller distance is none
LEVEL = 1.8  # times a band: embeddings, the head and activations may be rounded, too
LEVEL_OF_4_BITS = 1.5  # where faults are near
FAR = 4.0  # times a band: an answer that is far off
MOST_FAR = 0.06  # of the answers, where experts are nearly tied
EVEN = 0.25  # of the median that nine tenths of the answers reach
MEANING = {
    "float32": "computes this model",
    "bfloat16": "computes this model, up to rounding as bfloat16 does",
    "8-bit": "computes this model, up to rounding as 8-bit weights would",
    "fp8": "computes this model, up to rounding as 8-bit weights would (fp8)",
    "4-bit": "computes this model, up to rounding as 4-bit weights would",
}


@dataclass(frozen=True, slots=True)
class Answered:
    """What was asked, and its answers."""

    label: str
    top: Sequence[Top | None]  # by position, over all prompts; None where it was not asked
    widest: str  # band that its number format allows
    other_tokens: Sequence[int] = ()  # numbers of prompts of which it makes other tokens
    golden: Sequence[Top | None] | None = (
        None  # the golden answers in the tokens that it names, where these are not all
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison with golden answers says."""

    label: str
    verdict: Literal["same", "same up to rounding", "different"]
    band: str | None  # the narrowest that holds it; None if it is different
    distance: float  # nats: the median over all positions
    largest: float
    allowed: float  # the median distance that the widest band that counts here would have
    widest: str
    prompt: int  # where it is largest
    position: int
    other_tokens: tuple[int, ...]
    cause: str | None = None

    @property
    def exit_status(self) -> int:
        return int(self.verdict == "different")

    def blocks(self, golden: GoldenAnswers) -> list[Block]:
        """Return the verdict for people."""
        place = f"after token {self.position + 1} of prompt {self.prompt + 1}"
        text = golden.prompts[self.prompt].text
        facts = {
            "distance": f"{self.distance:.5f} nats (median of a top token's log-probability)",
            "largest": f"{self.largest:.5f}, {place}" + ("" if text is None else f": {text[:60]!r}"),
            "allowed": f"{LEVEL * self.allowed:.5f} ({self.widest})",
        }
        if self.cause is not None:
            facts["likeliest cause"] = self.cause
        return [Text(self.sentence), Facts(tuple(facts.items()))]

    @property
    def sentence(self) -> str:
        if self.band is not None:
            return f"{self.label} {MEANING[self.band]}."
        if self.other_tokens:
            shown = ", ".join(str(number + 1) for number in self.other_tokens[:3])
            return f"{self.label} is different: its tokenizer or chat template makes other tokens of prompts {shown}."
        return f"{self.label} is different: it computes another model."


def level_of(distances: Sequence[float], band: Sequence[float], is_exact: bool) -> float | None:
    """Return the median distance in units of a band; None where rounding of that kind does not explain them all."""
    typical = max(median(band), EXACT)
    level = median(distances) / typical
    limits = [max(value, typical) for value in band]
    shares = sorted(value / limit for value, limit in zip(distances, limits, strict=True))
    tenth = len(shares) // 10
    far = sum(share > FAR for share in shares)
    is_even = sorted(distances)[tenth] > UNTOUCHED and shares[tenth] >= EVEN * median(shares)
    explained = far == 0 if is_exact else is_even and far <= MOST_FAR * len(shares)
    return level if explained else None


def compare(golden: GoldenAnswers, answered: Answered) -> Verdict:
    """Return the verdict on answers, by the narrowest band that holds them."""
    numbers = list[int]()
    distances = list[float]()
    for number, (first, second) in enumerate(zip(answered.golden or golden.top, answered.top, strict=True)):
        if first is not None and second is not None:
            numbers.append(number)
            distances.append(first.distance(second))
    counted = BANDS[: BANDS.index(answered.widest) + 1]
    bands = dict[str, list[float]]()
    for band in golden.bands:
        bands[band.name] = [band.distances[number] for number in numbers]
    name = next((name for name in counted if _holds(name, distances, bands[name])), None)
    if answered.other_tokens:
        name = None
    worst = max(range(len(distances)), key=distances.__getitem__)
    prompt, position = golden.places[numbers[worst]]
    kind: Literal["same", "same up to rounding", "different"] = "different"
    if name is not None:
        kind = "same" if name == "float32" else "same up to rounding"
    return Verdict(
        label=answered.label,
        verdict=kind,
        band=name,
        distance=median(distances),
        largest=distances[worst],
        allowed=max(median(bands[answered.widest]), EXACT),
        widest=answered.widest,
        prompt=prompt,
        position=position,
        other_tokens=tuple(answered.other_tokens),
    )


def _holds(name: str, distances: Sequence[float], band: Sequence[float]) -> bool:
    level = level_of(distances, band, name == BANDS[0])
    return level is not None and level <= (LEVEL_OF_4_BITS if name == BANDS[-1] else LEVEL)


def widest_band(bits: float | None) -> str:
    """Return the widest band that weights of so many bits allow; where nobody knows, that of 8-bit weights."""
    if bits is None:
        return "8-bit"
    if bits >= 15:
        return "bfloat16"
    return "8-bit" if bits > 7 else "4-bit"
