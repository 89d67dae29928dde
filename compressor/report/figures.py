"""The figures of a report: the same drawings for the page, as SVG, and for a model card, as PNG."""

from collections.abc import Callable, Mapping, Sequence

from compressor.report.bars import size_parts, time_parts, visit_parts
from compressor.report.data import ReportData
from compressor.report.dots import error_parts, gate_parts
from compressor.report.drawing import Panel, Picture, inline_svg
from compressor.report.matrices import similarity_parts
from compressor.words import counted

SIZES, SIMILARITY, VISITS, ERRORS, GATE, TIMES = NAMES = ("sizes", "similarity", "visits", "errors", "gate", "times")
FIGURES: Mapping[str, tuple[str, Callable[[ReportData], tuple[Panel, ...]]]] = {  # title, and what draws it
    SIZES: ("What is left of experts, parameters and bytes", size_parts),
    SIMILARITY: ("Similarity of the experts, with the chosen groups", similarity_parts),
    VISITS: ("Visits of the experts before, and of the slots after", visit_parts),
    ERRORS: ("Reconstruction error of each layer", error_parts),
    GATE: ("Drops of the gate's tasks with their bounds", gate_parts),
    TIMES: ("Time by phase", time_parts),
}


def pictures(data: ReportData, names: Sequence[str] = NAMES) -> tuple[Picture, ...]:
    """The figures of these names that the data gives, by default all in the order of the page."""
    found, said = [], captions(data)
    for name in names:
        title, drawn = FIGURES[name]
        if parts := drawn(data):
            svg = "\n".join(inline_svg(part, f"{name}-{number}") for number, part in enumerate(parts))
            found.append(Picture(name, title, _alt(parts), said[name], svg, parts))
    return tuple(found)


def _alt(parts: Sequence[Panel]) -> str:
    """The parts' own words, each after its title if there are several."""
    said = [part for part in parts if not part.is_legend]
    return said[0].alt if len(said) == 1 else " ".join(f"{part.title}: {part.alt}" for part in said)


def captions(data: ReportData) -> dict[str, str]:
    """What each figure shows and how to read it."""
    labels = ", ".join(dict.fromkeys(layer.similarity_label for layer in data.layers if layer.similarity_label))
    measured = f" ({labels})" if labels else ""
    text = f" of {data.measured_text}" if data.measured_text else ""
    tokens = f" on {counted(data.measured_tokens, 'token')}{text}" if data.measured_tokens else ""
    corrected = any(layer.heldout_error_after is not None for layer in data.layers)
    return {
        SIZES: "The whole bar is the source, the filled part what the compressed model has of it.",
        SIMILARITY: f"A square for each layer shows how alike the source's experts are{measured}. "
        "They are ordered so that merged ones lie side by side; ✕ marks a dropped expert, ★ a protected one.",
        VISITS: f"Share of the routed tokens{tokens}: the source's experts above, the compressed model's slots below, "
        "each model with its own routing; the dashed line is an even share.",
        ERRORS: f"Squared error of the compressed MoE block's output over the squared output of the source's{tokens}, "
        "on the source's own inputs; 0 is no change."
        + (" Held-out errors are those of the correction, on tokens that it did not see." if corrected else ""),
        GATE: "Each line runs from the lower to the upper confidence bound of a task's drop. Left of the dashed line "
        "is a pass (circle), right of it a fail (cross), across it inconclusive (hollow diamond).",
        TIMES: "The numbers are those of the table's rows.",
    }
