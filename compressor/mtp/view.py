"""A checkpoint seen as that of another model: some of its tensors, under other names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compressor.checkpoint.reader import Checkpoint


class CheckpointView(Checkpoint):
    """Tensors of a checkpoint by the names that another model gives them; files and bytes are the checkpoint's own."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str], raw_config: dict[str, Any]) -> None:
        """`names` maps each name here to the stored one."""
        self.folder, self.raw_config, self.stored = checkpoint.folder, raw_config, dict(names)
        self.tensors = {name: replace(checkpoint.tensors[own], name=name) for name, own in names.items()}
