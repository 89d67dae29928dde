"""Whether a calibration text suffices for a model, and what a run on it costs: from one pass of it.

The pass is that of a plan by the default recipe at three quarters of the experts. Half of each
batch goes into one plan, half into another, so that their difference shows the chance in them."""

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from compressor.data.batches import Calibration
from compressor.document.blocks import Block, Facts, Heading, Table, Text
from compressor.errors import CompressionError
from compressor.formatting import counted, human_bytes, percent
from compressor.frozen import frozen
from compressor.model.experts import width_of
from compressor.pipeline.dry_run import DryRun, dry_run
from compressor.pipeline.resolve import Session
from compressor.recipe.recipe import Recipe, default_steps
from compressor.recipe.step import TextOptions
from compressor.statistics.statistics import collect
from compressor.steps.prune.options import Prune
from compressor.steps.prune.planning import spec_of

RATIO = 0.25  # of the experts that go
# Share of the kept experts that both halves must have in common. Either is half as large as the
# text, and they differ by the chance in both, so the plan of the text itself differs from that of
# endless text by about half as many experts.
ALIKE = 0.95


@frozen
class LayerOnText:
    """What an MoE layer saw of the text."""

    layer: str
    tokens: tuple[int, ...]  # routed to each expert
    kept: tuple[tuple[int, ...], tuple[int, ...]]  # the experts that the plan of each half keeps

    @property
    def common(self) -> int:
        """Experts that both plans keep."""
        return len({*self.kept[0]} & {*self.kept[1]})


@frozen
class TextCheck:
    """What one pass of a text shows."""

    sources: tuple[str, ...]
    tokens: int
    samples: int
    # Neurons of an expert, the tokens that it should see: with fewer, the refit of its down
    # projection, and GPTQ's Hessian of it, have less data than unknowns.
    enough: int
    layers: tuple[LayerOnText, ...]
    pass_seconds: float
    seconds: float  # of the run, estimated
    memory: int  # bytes, of the run
    disk: int  # bytes, of its output

    @property
    def starved(self) -> list[tuple[int, LayerOnText, int]]:
        """Tokens, layer and number of each expert that saw too few, the fewest first."""
        seen = list[tuple[int, LayerOnText, int]]()
        for layer in self.layers:
            for expert, tokens in enumerate(layer.tokens):
                if tokens < self.enough:
                    seen.append((tokens, layer, expert))
        return sorted(seen, key=lambda entry: entry[0])

    @property
    def verdicts(self) -> tuple[str, str]:
        """A sentence on the tokens that experts saw, and one on the plans of both halves."""
        starved = self.starved
        experts = sum(len(layer.tokens) for layer in self.layers)
        kept = sum(len(layer.kept[0]) for layer in self.layers)
        common = sum(layer.common for layer in self.layers)
        seen = f"The text suffices: every expert saw at least {self.enough:,} tokens, its neurons."
        if starved:
            tokens, layer, expert = starved[0]
            seen = (
                f"Give more text: {len(starved):,} of {counted(experts, 'expert')} saw fewer than "
                f"{self.enough:,} tokens, their neurons, the fewest {tokens:,} (expert {expert} of "
                f"{layer.layer})."
            )
        verdict = "The text suffices" if common >= ALIKE * kept else "Give more text"
        planned = (
            f"{verdict}: the plans of its halves have {common:,} of {kept:,} kept experts in "
            f"common ({percent(common / kept)}; by chance {percent(kept / experts)})."
        )
        return seen, planned

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {**asdict(self), "verdicts": self.verdicts}


def halves(calibration: Calibration) -> tuple[Calibration, Calibration]:
    """Return the same batches twice, cut in two, of which each calibration has its half observed.

    A batch of one sequence goes into one of them. Raises `CompressionError` for a single
    sequence."""
    batches = list[Tensor]()
    sources = list[int]()
    for number, batch in enumerate(calibration.batches):
        parts = (batch,) if len(batch) == 1 else batch.chunk(2)
        batches += parts
        sources += [calibration.source_of(number)] * len(parts)
    if len(batches) < 2:
        raise CompressionError(
            "the text is too short, one sequence of it: give at least two to compare, by more text "
            "or --samples"
        )
    whole = replace(calibration, batches=tuple(batches), sources=tuple(sources))
    even = frozenset(range(0, len(batches), 2))
    odd = frozenset(range(1, len(batches), 2))
    return replace(whole, heldout=odd), replace(whole, heldout=even)


def check_text(session: Session, text: TextOptions, calibration: Calibration) -> TextCheck:
    """Pass a text, as read by its options, once through an opened model, and compare the plans by
    its halves.

    Raises `CompressionError` for a single sequence, and what the default recipe raises."""
    model = session.model
    steps = default_steps(ratio=RATIO)
    content = {"model": model.source.name, "revision": model.source.revision, "steps": steps}
    run = dry_run(Recipe.of({**content, "calibration": text}, "inspect"))
    spec = spec_of(Prune(ratio=RATIO), model)
    needs = spec.strategy.needs | {"routed_count"}
    layers = []
    with session.clock.phase("plan"):
        first, second = halves(calibration)
        found = collect(model, needs, first, session.progress, others=[second])
        for pair in zip(found, found, strict=True):  # of one layer, on each half
            tokens = pair[0].routed_count + pair[1].routed_count
            kept = []
            for statistics in pair:
                plan = spec.strategy.plan_layer(statistics, spec.experts)
                kept.append(tuple(group.members[0] for group in plan.groups))
            counts = tuple(round(count) for count in tokens.tolist())
            layers.append(LayerOnText(pair[0].layer.name, counts, (kept[0], kept[1])))
    seconds = session.clock.seconds["plan"]
    return TextCheck(
        sources=tuple(source["source"] for source in calibration.identity["sources"]),
        tokens=calibration.tokens,
        samples=sum(map(len, calibration.batches)),
        enough=width_of(model.partial.model.get_submodule(layers[0].layer)),
        layers=tuple(layers),
        pass_seconds=seconds,
        seconds=seconds * passed_tokens(run) / calibration.tokens,
        memory=run.memory,
        disk=run.after.bytes,
    )


def passed_tokens(run: DryRun) -> int:
    """Return the tokens that pass the model in a run: in each step's passes, in optimizer steps of
    `tune`, which cost about as much as a pass with statistics, and to evaluate output and base."""
    total = 0
    for step in run.steps:
        correct = step["options"].get("correct", {})
        if correct.get("method") == "tune":
            total += correct["steps"] * correct["tokens"]
        for text in run.texts:
            total += step["passes"] * text.samples * text.sequence_length
    for text in run.texts:
        total += 2 * sum(count * length for _, count, length in text.parts)
    return total


def text_blocks(check: TextCheck) -> list[Block]:
    """Return what a text shows for people: figures, the layers in doubt, and the verdicts."""
    by_layer = Counter(layer.layer for _, layer, _ in check.starved)
    rows = []
    for layer in check.layers:
        kept = len(layer.kept[0])
        if by_layer[layer.layer] or layer.common < ALIKE * kept:
            fewest = min(layer.tokens)
            worst = f"{fewest:,} (expert {layer.tokens.index(fewest)})"
            alike = f"{layer.common} of {kept}"
            rows.append((layer.layer, str(by_layer[layer.layer]), worst, alike))
    facts = {
        "tokens": f"{check.tokens:,} of {', '.join(check.sources)}, {check.pass_seconds:.3g} s",
        "the default at 3/4 of the experts": f"about {check.seconds:.3g} s, "
        f"{human_bytes(check.memory)} of memory, {human_bytes(check.disk)} on disk",
    }
    blocks: list[Block] = [Heading("Calibration text"), Facts(facts.items())]
    if rows:
        few = f"experts under {check.enough:,} tokens"
        columns = ("layer", few, "fewest tokens", "kept by both halves")
        blocks.append(Table("Layers in doubt", columns, rows))
    return [*blocks, *map(Text, check.verdicts)]
