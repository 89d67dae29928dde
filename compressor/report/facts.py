"""The facts of an outcome: each is defined here once, with the views that show it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compressor.document.blocks import Code, Facts, Items, Words
from compressor.formatting import counted, human_bytes, label, setting, span
from compressor.model.constant_experts import NOT_STOCK
from compressor.model.serving import servers_in_words
from compressor.pipeline.outcome import Outcome
from compressor.recipe.document import first_of, step_line
from compressor.recipe.plan import describe_split
from compressor.run_record import versions

# views
TERMINAL = ("terminal",)
RECORD = ("page", "card")
NOT_CARD = ("page", "terminal")
EVERYWHERE = ("page", "card", "terminal")


@dataclass(frozen=True, slots=True)
class Fact:
    """A label and what it stands for; an empty value is not shown."""

    label: str
    value: Words | Items
    views: Collection[str] = RECORD


def facts(outcome: Outcome, view: str) -> Facts:
    """Return the facts that a view shows."""
    shown = [fact for fact in _facts(outcome) if fact.value and view in fact.views]
    return Facts([(fact.label, fact.value) for fact in shown])


def _facts(outcome: Outcome) -> Iterator[Fact]:
    """Yield all facts in the order in which they are read; models and files by name, without a
    machine's folders."""
    plan, experts = outcome.plan, outcome.expert_plan
    revision = f", revision {plan.source.revision}" if plan.source.revision else ""
    yield Fact(
        "Base", f"{label(plan.source.model)}{revision}, fingerprint {plan.source.fingerprint}"
    )
    yield Fact("Strategy", outcome.strategy)
    options = {
        name: value
        for name, value in plan.strategy_options.items()
        if not isinstance(value, Mapping)
    }
    yield Fact("Options", setting(options) if options else "")
    top = f", top {outcome.top_k}" if experts.layers else ""
    counts = f"{outcome.experts_before} before, {outcome.experts_after} after{top}"
    yield Fact("Experts per MoE layer", counts)
    yield Fact("Split", describe_split(plan.split) if plan.split else "")
    yield Fact("MoE layers", f"{len(experts.layers):,}" if experts.layers else "")
    yield Fact("Reconstruction", setting(plan.correction) if plan.correction else "none")
    for step in outcome.steps:
        yield Fact(step["name"].capitalize(), step_line(step))
    yield Fact("Quantize", step_line(outcome.quantized) if outcome.quantized else "")
    sequential = "each layer was planned on what the compressed earlier layers output"
    yield Fact("Sequential", sequential if plan.sequential else "no")
    if experts.has_constants:
        replaced = counted(sum(len(layer.constants) for layer in experts.layers), "expert")
        remaining = span(len(layer.groups) for layer in experts.layers)
        constants = f"for {replaced}; the layers keep {remaining} each; {NOT_STOCK}"
        yield Fact("Constants", constants, NOT_CARD)
    if plan.calibration is None:
        yield Fact(
            "Calibration",
            "none; no text was read" + (" to choose experts" if outcome.steps else ""),
        )
    else:
        yield from _text_facts("Calibration", plan.calibration)
    for planned in plan.steps:
        if planned.text is not None:
            yield from _text_facts(f"Text of the step {planned.name}", planned.text)
    if outcome.seconds:
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.seconds.items())
        yield Fact("Time", f"{phases}; peak memory {human_bytes(outcome.peak_memory)}", TERMINAL)
    for head, acceptance in outcome.acceptance.items():
        agreement = [
            f"{when} {acceptance[when]:.1%}" for when in ("before", "after") if when in acceptance
        ]
        text = "held-out calibration text" if acceptance.get("heldout") else "calibration text"
        positions = f"{acceptance['positions']:,} positions of {text}"
        chosen = (
            "the head's argmax token is the one that the model chooses, "
            f"{', '.join(agreement)} of {positions}"
        )
        yield Fact(head, chosen, NOT_CARD)
    if outcome.left_out:
        tensors = (
            f"{counted(len(outcome.left_out), 'tensor')} that stock transformers does not load"
        )
        yield Fact(
            "Left out of the output", f"{tensors}: {first_of(outcome.left_out, 8)}", EVERYWHERE
        )
    if outcome.zeroed_fields:
        zeroed = f"{setting(outcome.zeroed_fields)}, as no multi-token-prediction head is stored"
        yield Fact("Set to zero in the config", zeroed, EVERYWHERE)
    if outcome.servers is not None:
        yield Fact("Servers", servers_in_words(outcome.servers), TERMINAL)
    loading = outcome.loader_fault or ""
    if outcome.quantized and not loading:
        stock = f"transformers {versions()['transformers']}"
        loading = (
            f"{stock} finds a place for every tensor, by its own report on their names and shapes"
        )
    yield Fact("Stock loading", loading, NOT_CARD)
    yield Fact("Versions", setting(outcome.versions))
    yield Fact("Plan, SHA-256", Code(plan.digest()))


def _text_facts(name: str, text: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield source, size and digest of a text that steps read."""
    size = {
        key.replace("_", " "): text[key]
        for key in text
        if key not in ("source", "sources", "sha256", "asked")
    }
    parts = [setting({**part, "source": label(part["source"])}) for part in text.get("sources", ())]
    yield Fact(name, label(text["source"]))
    yield Fact(f"{name}: size", setting(size))
    yield Fact(f"{name}: sources", Items(parts) if len(parts) > 1 else "")
    yield Fact(
        f"{name}: SHA-256 of the token ids", Code(text["sha256"]) if "sha256" in text else ""
    )
