"""Make a GGUF model smaller by a plan, and keep the plan in its metadata."""

import json
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compressor.checkpoint.headers import Size
from compressor.gguf_files.blocks import Blocks, cut
from compressor.gguf_files.header import ARRAY, STRING, Value, packed
from compressor.gguf_files.parts import Gguf
from compressor.gguf_files.writing import write_gguf
from compressor.progress import Progress
from compressor.recipe.plan import CompressionPlan
from compressor.run_record import versions

PLANS, VERSION = "moe_compressor.plans", "moe_compressor.version"
LABEL = "general.size_label"


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """What became of a GGUF model."""

    out: tuple[str, ...]  # the files, the first first
    architecture: str
    strategy: str
    experts_before: int
    experts_after: int
    before: Size
    after: Size
    seconds: float
    note: str  # how well the plan matches the file, where it was made on a checkpoint
    plan: CompressionPlan = field(repr=False)


def carry_out(
    model: Gguf, blocks: Blocks, plan: CompressionPlan, out: Path, overwrite: bool, progress: Progress, note: str = ""
) -> GgufSummary:
    """Write the model with the experts that the plan keeps; the plan must be one for this model's blocks."""
    start = time.monotonic()
    chosen = {layer.layer: [group.members[0] for group in layer.groups] for layer in plan.layers}
    kept = {name: chosen[number] for name, number in blocks.homes.items()}
    paths = write_gguf(model, kept, new_values(model, blocks, plan), out, overwrite, progress)
    tensors = model.tensors.values()
    return GgufSummary(
        tuple(map(str, paths)),
        blocks.arch,
        plan.strategy,
        blocks.experts,
        plan.experts,
        Size.of(tensors),
        Size.of(cut(tensor, blocks, plan.experts) for tensor in tensors),
        time.monotonic() - start,
        note,
        plan,
    )


def new_values(model: Gguf, blocks: Blocks, plan: CompressionPlan) -> Mapping[str, Value]:
    """The metadata that changes: the number of experts, the label that repeats it, and the plans, the last one last."""
    values = model.first.values
    found = {blocks.count_key: values[blocks.count_key].with_number(plan.experts)}
    label, begins = model.first.text(LABEL), f"{blocks.experts}x"
    if label.startswith(begins):
        found[LABEL] = Value.of_text(f"{plan.experts}x{label.removeprefix(begins)}")
    text = json.dumps(plan.to_dict(), separators=(",", ":"))
    found[PLANS] = _appended(values.get(PLANS), text)
    found[VERSION] = Value.of_text(versions()["moe-compressor"])
    return found


def _appended(before: Value | None, text: str) -> Value:
    """An array of strings with one more at its end."""
    earlier, count = b"", 0
    if before is not None and before.kind == ARRAY and int.from_bytes(before.raw[:4], "little") == STRING:
        earlier, count = before.raw[12:], int.from_bytes(before.raw[4:12], "little")
    return Value(ARRAY, struct.pack("<IQ", STRING, count + 1) + earlier + packed(text))
