"""What an exporter is handed: the output's tensors, how to make them, and the files beside them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from compressor.surgery.tensors import OutputTensor, Piece

MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class OutputJob:
    """One output to write. `produce` yields, for a unit, each of its tensors' names and bytes."""

    digest: str  # decides whether an interrupted run of the same job may be resumed
    outputs: tuple[OutputTensor, ...]
    units: tuple[str, ...]  # in order; "" is the rest of the model
    produce: Callable[[str], Iterable[tuple[str, Iterator[Piece]]]]
    files: Mapping[str, bytes | Path]  # config, tokenizer and so on: contents, or a file to copy
    verify: Callable[[Path], None]  # raises CompressionError when the written folder is not good
    max_shard_bytes: int = MAX_SHARD_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(output.nbytes for output in self.outputs)
