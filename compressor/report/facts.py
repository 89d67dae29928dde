"""The facts of an outcome: each is defined here once, with the views that show it; those of a step
are what its `describe` returns."""

from collections.abc import Collection

from compressor.document.blocks import Code, Facts, Items, Words
from compressor.formatting import counted, first_of, human_bytes, label, setting
from compressor.model.serving import servers_in_words
from compressor.pipeline.outcome import Outcome
from compressor.run_record import versions

# views
TERMINAL = ("terminal",)
RECORD = ("page", "card")
NOT_CARD = ("page", "terminal")
EVERYWHERE = ("page", "card", "terminal")
UNSHOWN = ("source", "sources", "sha256", "asked")  # of a text, beside its size


def facts(outcome: Outcome, view: str) -> Facts:
    """Return the facts that a view shows, in the order in which they are read; models and files by
    name, without a machine's folders. An empty value is not shown."""
    plan = outcome.plan
    layers = outcome.expert_plan.layers
    shown = list[tuple[str, Words | Items]]()

    def add(label: str, value: Words | Items, views: Collection[str] = RECORD) -> None:
        if value and view in views:
            shown.append((label, value))

    revision = f", revision {plan.source.revision}" if plan.source.revision else ""
    add("Base", f"{label(plan.source.model)}{revision}, fingerprint {plan.source.fingerprint}")
    top = f", top {outcome.top_k}" if layers else ""
    counts = f"{outcome.experts_before} before, {outcome.experts_after} after{top}"
    add("Experts per MoE layer", counts)
    add("MoE layers", f"{len(layers):,}" if layers else "")
    for section in outcome.sections:
        for name, value in section.facts.items():
            add(name, value)
    add("Computed in", plan.dtype)
    texts = {"Calibration": plan.text}
    for planned in plan.steps:
        if planned.text is not None:
            texts[f"Text of the step {planned.name}"] = planned.text
    for name, text in texts.items():
        if text is None:
            chosen = " to choose experts" if outcome.steps else ""
            add(name, f"none; no text was read{chosen}")
            continue
        size = {key.replace("_", " "): text[key] for key in text if key not in UNSHOWN}
        parts = [
            setting({**part, "source": label(part["source"])}) for part in text.get("sources", ())
        ]
        add(name, label(text["source"]))
        add(f"{name}: size", setting(size))
        add(f"{name}: sources", Items(parts) if len(parts) > 1 else "")
        digest = Code(text["sha256"]) if "sha256" in text else ""
        add(f"{name}: SHA-256 of the token ids", digest)
    if outcome.receipt is not None:
        figures = outcome.receipt.figures
        words = (
            f"KL {figures.kl:.4f} (median {figures.kl_median:.4f}, 95% {figures.kl_p95:.4f}, "
            f"99% {figures.kl_p99:.4f}, largest {figures.kl_largest:.4f}), the base's greedy token "
            f"at {figures.agreement:.1%}, loss {figures.base_loss:.4f} → {figures.loss:.4f}, over "
            f"{outcome.receipt.tokens:,} tokens; check --receipt repeats it"
        )
        add("Receipt", words)
    if outcome.seconds:
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.seconds.items())
        add("Time", f"{phases}; peak memory {human_bytes(outcome.peak_memory)}", TERMINAL)
    for head, acceptance in outcome.acceptance.items():
        agreement = [
            f"{when} {acceptance[when]:.1%}" for when in ("before", "after") if when in acceptance
        ]
        held = "held-out calibration text" if acceptance.get("heldout") else "calibration text"
        chosen = (
            "the head's argmax token is the one that the model chooses, "
            f"{', '.join(agreement)} of {acceptance['positions']:,} positions of {held}"
        )
        add(head, chosen, NOT_CARD)
    if outcome.left_out:
        tensors = (
            f"{counted(len(outcome.left_out), 'tensor')} that stock transformers does not load"
        )
        add("Left out of the output", f"{tensors}: {first_of(outcome.left_out, 8)}", EVERYWHERE)
    if outcome.zeroed_fields:
        zeroed = f"{setting(outcome.zeroed_fields)}, as no multi-token-prediction head is stored"
        add("Set to zero in the config", zeroed, EVERYWHERE)
    if outcome.servers is not None:
        add("Servers", servers_in_words(outcome.servers), TERMINAL)
    loading = outcome.loader_fault or ""
    if outcome.quantized and not loading:
        stock = f"transformers {versions()['transformers']}"
        loading = (
            f"{stock} finds a place for every tensor, by its own report on their names and shapes"
        )
    add("Stock loading", loading, NOT_CARD)
    add("Versions", setting(outcome.versions))
    add("Plan, SHA-256", Code(plan.digest()))
    return Facts(shown)
