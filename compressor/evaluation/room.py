"""Whether a model answers in memory or streamed, and which tasks it can answer streamed."""

from collections.abc import Sequence

import torch

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import ModelSource
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.evaluation.tasks import EvaluationOptions, EvaluationTask
from compressor.memory import available
from compressor.model.architecture import build_meta, load_config
from compressor.model.bounds import most_parts
from compressor.model.opened import pick_device, pick_dtype
from compressor.words import human_bytes

HEADROOM = 2**30  # bytes beside the weights: what lm-eval, a batch's activations and its logits take
SHARE = 1.1  # of the weights: a layer is there twice while the stock loader puts its experts together
GROWTH = 8  # of stored bytes at most, from 4 bits to 32
WRITTEN = "generate_until"


def weight_bytes(source: ModelSource, dtype: str) -> int:
    """Bytes of all weights in memory, in the dtype that they compute in; those that are tied count once."""
    checkpoint, config = Checkpoint(source.folder), load_config(source.folder)
    found = pick_dtype(dtype, config, checkpoint)
    return sum(value.nbytes for value in build_meta(config, found, most_parts(checkpoint)).parameters())


def streams(source: ModelSource, options: EvaluationOptions) -> bool:
    """Whether the model is to be streamed: as the options say, by several ranks, or where it does not fit into memory.

    Raises `CompressionError` where several ranks are asked not to.
    """
    if not here().is_alone:
        if options.stream is False:
            raise CompressionError(
                "several ranks answer layer by layer; leave out --no-stream, or start it without torchrun"
            )
        return True
    return options.stream if options.stream is not None else not fits(source, options.dtype, options.device)


def fits(source: ModelSource, dtype: str, device: str) -> bool:
    """Whether the whole model, computing in this dtype on this device, fits into the memory at hand."""
    room = _room(device)
    stored = sum(info.nbytes for info in Checkpoint(source.folder).tensors.values())
    if room is None or _needed(GROWTH * stored) <= room:  # a model this small need not be built to be measured
        return True
    return _needed(weight_bytes(source, dtype)) <= room


def _needed(weights: int) -> float:
    return SHARE * weights + HEADROOM


def _room(name: str) -> int | None:
    """Bytes that weights may take: of memory, and of the device's own where it has some, for they pass through both."""
    device = pick_device(name)
    told = [available()]
    if device.type == "cuda":
        told.append(int(torch.cuda.mem_get_info(device)[0]))
    known = [room for room in told if room is not None]
    return min(known) if known else None


def refuse_written(source: ModelSource, options: EvaluationOptions, tasks: Sequence[EvaluationTask]) -> None:
    """Refuse tasks whose answers a streamed model would have to write, which reads all layers anew for every token."""
    for task in tasks:
        for name, part in task.parts.items():
            if getattr(part, "OUTPUT_TYPE", None) == WRITTEN:
                size = human_bytes(weight_bytes(source, options.dtype))
                taken = f"{source.label} takes {size} there, more than is free"
                why = "--stream is asked for" if options.stream else taken
                raise CompressionError(
                    f"task {name!r} writes its answers, which needs the model in memory, and {why}; name tasks of "
                    "multiple choice or likelihood, or pass --no-stream"
                )
