"""What a stranger's config may ask for: no more than its checkpoint could fill, found out before it is made."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules import module as registering

from compressor.checkpoint.reader import Checkpoint
from compressor.errors import CompressionError
from compressor.records import RESTORE, read_object

REPEATED = re.compile(r"(?<!per_)(layers?|labels?|blocks?|depths?|stages?|kernel_size)$")  # made lists of by a config
MOST_ENTRIES = 10_000  # of such a list, and of one that it has
MOST_BYTES = 2**25  # of config.json
MOST_PARTS = 100_000  # modules, parameters and buffers of a model
SPARE_PARTS, PARTS_EACH = 5_000, 16  # at the least, and for each stored tensor: a fused one may be several
SPARE_ELEMENTS, ELEMENTS_EACH = 2**26, 16  # at the least, and for each stored byte: some are packed


def check_config(path: Path) -> None:
    """Refuse a config.json that would keep transformers busy for long, or have it read another file instead."""
    if not path.is_file():
        return  # which transformers says
    if (size := path.stat().st_size) > MOST_BYTES:
        raise CompressionError(f"{path} has {size:,} bytes, the most is {MOST_BYTES:,}; {RESTORE}")
    raw = read_object(path)
    if "configuration_files" in raw:
        raise CompressionError(f"{path} names other files to be read in its place (configuration_files); {RESTORE}")
    nodes: list[tuple[str, Any]] = [("this object", raw)]
    while nodes:
        name, node = nodes.pop()
        if name == "quantization_config":  # which may name every module
            continue
        if isinstance(node, list | dict):
            _refuse_many(f"{path}: {name} has {len(node)} entries", len(node))
            nodes += node.items() if isinstance(node, dict) else [(name, entry) for entry in node]
        elif isinstance(node, int) and REPEATED.search(name):
            _refuse_many(f"{path}: {name} is {node}", node)


def _refuse_many(what: str, count: float) -> None:
    if count > MOST_ENTRIES:
        raise CompressionError(f"{what}, the most is {MOST_ENTRIES:,}; {RESTORE}")


@contextmanager
def bounded_build(most: int = MOST_PARTS) -> Iterator[None]:
    """Raise `CompressionError` as soon as a model built within this has more than `most` parts."""
    parts = 0

    def count(*_: Any) -> None:
        nonlocal parts
        parts += 1
        if parts > most:
            raise CompressionError(
                f"config.json asks for a model of more than {most:,} modules and tensors, which this checkpoint cannot "
                f"fill; {RESTORE}"
            )

    handles = [
        registering.register_module_module_registration_hook(count),
        registering.register_module_parameter_registration_hook(count),
        registering.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def most_parts(checkpoint: Checkpoint) -> int:
    """Modules and tensors that the model of a checkpoint may have."""
    return SPARE_PARTS + PARTS_EACH * len(checkpoint.tensors)


def refuse_unfilled(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Refuse a model on meta with far more elements than are stored; its computed buffers would fill the memory."""
    asked = sum(value.numel() for value in (*model.parameters(), *model.buffers()))
    stored = sum(info.nbytes for info in checkpoint.tensors.values())
    if asked > SPARE_ELEMENTS + ELEMENTS_EACH * stored:
        raise CompressionError(
            f"config.json asks for a model of {asked:,} elements, the checkpoint stores {stored:,} bytes; {RESTORE}"
        )
