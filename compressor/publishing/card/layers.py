"""What became of each expert, layer by layer, as a table that folds away."""

from collections import Counter
from dataclasses import dataclass

from compressor.document.blocks import Block, Code, Details, Table, Text
from compressor.recipe.plan import CompressionPlan, LayerPlan, correction_of
from compressor.words import counted, joined, one_line, ranges

MOST_TABLE = 150_000  # letters; what is longer nobody reads, and compression.json has it


@dataclass(frozen=True, slots=True)
class Dispositions:
    """How many experts of all layers went which way."""

    kept: int  # untouched by the plan
    rescaled: int  # alone in their group, but not as they were
    merged: int  # experts that became fewer
    groups: int  # which they became
    dropped: int
    gone: str = "dropped"  # what became of those

    @classmethod
    def of(cls, plan: CompressionPlan) -> "Dispositions":
        """The counts over all layers."""
        groups = [group for layer in plan.layers for group in layer.groups]
        several = [group for group in groups if len(group.members) > 1]
        kept = sum(group.untouched for group in groups)
        return cls(
            kept=kept,
            rescaled=len(groups) - len(several) - kept,
            merged=sum(len(group.members) for group in several),
            groups=len(several),
            dropped=sum(len(layer.dropped) for layer in plan.layers),
            gone="dropped" if plan.constants is None else "replaced by constants",
        )

    def __str__(self) -> str:
        """'40 experts kept, 24 merged into 8, 8 dropped'."""
        found = [
            *([f"{counted(self.kept, 'expert')} kept"] if self.kept else []),
            *([f"{self.rescaled:,} rescaled"] if self.rescaled else []),
            *([f"{self.merged:,} merged into {self.groups:,}"] if self.merged else []),
            *([f"{self.dropped:,} {self.gone}"] if self.dropped else []),
        ]
        return joined(found)


def experts_before(plan: CompressionPlan) -> str:
    """'16', or '8 to 16' where layers differ."""
    counts = sorted({layer.experts for layer in plan.layers})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def kept(layer: LayerPlan) -> str:
    """Experts that the plan leaves as they are: '0-3,7'."""
    return ranges(group.members[0] for group in layer.groups if group.untouched)


def merged(layer: LayerPlan) -> str:
    """Groups that become one expert each: '1+5+7, 2+3'; an expert on its own was rescaled."""
    changed = [sorted(group.members) for group in layer.groups if not group.untouched]
    return ", ".join("+".join(map(str, members)) for members in changed) or "-"


def decided_by(layer: LayerPlan) -> str:
    """The statistic that decided, and the strategy that won where several were tried."""
    won = layer.figures.get("won")
    return f"{layer.decided_by}: {won}" if isinstance(won, str) else layer.decided_by or "-"


def error_change(layer: LayerPlan) -> str:
    """The held-out reconstruction error before and after the reconstruction."""
    figures = correction_of(layer)
    before, after = figures.get("heldout_error_before"), figures.get("heldout_error")
    if not (isinstance(before, float | int) and isinstance(after, float | int)):
        return "-"
    if figures.get("kept") == "none":
        return f"{before:.4g}, not corrected"
    return f"{before:.4g} to {after:.4g} ({figures.get('kept')})"


def layer_table(plan: CompressionPlan) -> Table:
    """One row a layer; names of modules only where a decoder layer has several."""
    often = Counter(layer.layer for layer in plan.layers)
    has_errors = any(correction_of(layer) for layer in plan.layers)
    columns = {
        "layer": lambda each: f"{each.layer} ({one_line(each.module)})" if often[each.layer] > 1 else str(each.layer),
        "kept": kept,
        "merged": merged,
        "dropped" if plan.constants is None else "constants": lambda layer: ranges(layer.dropped),
        **({"protected": lambda layer: ranges(plan.protected.get(layer.module, ()))} if plan.protected else {}),
        "decided by": lambda layer: one_line(decided_by(layer)),
        **({"held-out error": error_change} if has_errors else {}),
    }
    rows = tuple(tuple(cell(layer) for cell in columns.values()) for layer in plan.layers)
    return Table("", tuple(columns), rows, frozenset(columns))


def layer_details(plan: CompressionPlan) -> tuple[Block, ...]:
    """The table in a fold, with a legend."""
    if not plan.layers:
        return (Text("All experts stay."),)
    found = layer_table(plan)
    too_long = sum(len(str(cell)) for row in found.rows for cell in row) > MOST_TABLE
    elsewhere = Text(
        ("The list is too long for a page: ", Code("compression.json"), " has it under ", Code("plan"), ".")
    )
    legend = (
        "Numbers are those of the base's experts. Kept: as they were, apart from reconstruction and distillation. "
        "Merged: the experts joined by + became one; one that stands there alone was rescaled."
    )
    if any(correction_of(layer) for layer in plan.layers):
        legend += (
            " Held-out error: the share of the layer's output energy that is missed on held-out calibration tokens, "
            "to which neither plan nor reconstruction was fitted, before and after the reconstruction."
        )
    return (Details("What became of each expert", (Text(legend), elsewhere if too_long else found)),)


def winners(plan: CompressionPlan) -> dict[str, int]:
    """Strategies that decided layers in the plan's place, with how many each; empty unless several were tried."""
    names = sorted(str(layer.figures["won"]) for layer in plan.layers if isinstance(layer.figures.get("won"), str))
    return dict(Counter(names))
