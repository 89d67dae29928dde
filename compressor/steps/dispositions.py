"""What became of experts, in words and as a table."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from compressor.document.blocks import Table
from compressor.formatting import counted, joined, one_line, ranges
from compressor.recipe.plan import ExpertPlan, LayerPlan, correction_of


def dispositions(layer: LayerPlan, protected: Collection[int] = ()) -> list[str]:
    """Return what became of each expert [E]."""
    became = ["replaced by a constant" if layer.constants else "dropped"] * layer.experts
    for slot, group in enumerate(layer.groups):
        what = "kept" if group.untouched else "rescaled"
        if group.members[0] in protected:
            what = "protected"
        words = f"{what} as slot {slot}"
        if len(group.members) > 1:
            words = f"merged into slot {slot}"
        for member in group.members:
            became[member] = words
    return became


def gone(layers: Iterable[LayerPlan]) -> str:
    """Return what became of experts that are in no group."""
    return "replaced by constants" if any(layer.constants for layer in layers) else "dropped"


def all_dispositions(layers: Sequence[LayerPlan]) -> str:
    """Return '40 experts kept, 24 merged into 8 and 8 dropped': the experts of all layers."""
    groups = [group for layer in layers for group in layer.groups]
    merged = [group.members for group in groups if len(group.members) > 1]
    kept = sum(group.untouched for group in groups)
    rescaled = len(groups) - len(merged) - kept
    lost = sum(len(layer.dropped) for layer in layers)
    parts = [
        (kept, f"{counted(kept, 'expert')} kept"),
        (rescaled, f"{rescaled:,} rescaled"),
        (len(merged), f"{sum(map(len, merged)):,} merged into {len(merged):,}"),
        (lost, f"{lost:,} {gone(layers)}"),
    ]
    return joined([words for count, words in parts if count])


def experts_table(plan: ExpertPlan, caption: str = "") -> Table:
    """Return what became of each expert, a row for each layer; names of modules where a decoder
    layer has several.

    An expert that stands alone among the merged ones was rescaled."""
    count = Counter(layer.layer for layer in plan.layers)
    corrected = any(map(correction_of, plan.layers))
    rows = []
    for layer in plan.layers:
        name = str(layer.layer)
        if count[layer.layer] > 1:
            name += f" ({one_line(layer.module)})"
        kept = [group.members[0] for group in layer.groups if group.untouched]
        changed = [sorted(group.members) for group in layer.groups if not group.untouched]
        cells = {
            "layer": name,
            "experts": f"{layer.experts} → {len(layer.groups)}",
            "kept": ranges(kept),
            "merged": ", ".join("+".join(map(str, members)) for members in changed) or "-",
            "constants" if plan.has_constants else "dropped": ranges(layer.dropped),
        }
        if plan.protected:
            cells["protected"] = ranges(plan.protected.get(layer.module, ()))
        cells["decided by"] = one_line(layer.decided_by or "-")
        if corrected:
            cells["held-out error"] = "-"
            correction = correction_of(layer)
            before, after = correction.get("heldout_error_before"), correction.get("heldout_error")
            if before is not None and after is not None:
                way = correction.get("kept")
                outcome = ", not corrected" if way == "none" else f" to {after:.4g} ({way})"
                cells["held-out error"] = f"{before:.4g}{outcome}"
        rows.append(cells)
    columns = tuple(rows[0])
    return Table(caption, columns, [[*cells.values()] for cells in rows], columns)
