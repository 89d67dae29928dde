"""From trained tensors of the model back to those of the checkpoint: the same one, or several that it is made of."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from compressor.checkpoint.reader import TORCH_DTYPES
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.steps.distill.trained import TrainedLayer
from compressor.surgery.conversion import saved_names
from compressor.surgery.tensors import refuse_overflow


def stored_dtypes(model: OpenModel, layers: Sequence[TrainedLayer]) -> dict[str, torch.dtype]:
    """The dtype in which each trained tensor is stored, by state-dict key.

    Raises `CompressionError` for one that is stored quantised, or in a way that transformers would not write.
    """
    found = dict[str, torch.dtype]()
    for layer in layers:
        direct, others = _divided(model, layer.keys)
        empty = model.partial.empty
        found.update({key: _plain_dtype(model, key, name, empty[key]) for key, name in direct.items()})
        dtypes = {
            _plain_dtype(model, others[0], *saved) for saved in _saved(model, {key: empty[key] for key in others})
        }
        if len(dtypes) > 1:
            raise CompressionError(f"{others[0]} is stored in several dtypes, so it cannot be written back; convert it")
        found.update(dict.fromkeys(others, *dtypes))
    return found


def stored_tensors(
    model: OpenModel, values: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """A decoder layer's trained tensors by the names and in the dtypes of the checkpoint."""
    made = {key: refuse_overflow(key, value.to(dtypes[key])) for key, value in values.items()}
    direct, others = _divided(model, tuple(made))
    found = {name: made[key] for key, name in direct.items()}
    return found | {name: value.contiguous() for name, value in _saved(model, {key: made[key] for key in others})}


def _divided(model: OpenModel, keys: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The stored tensor of each key that is stored as the model has it, and the keys that are stored otherwise."""
    known = model.partial.keys
    direct = {key: name for name, key in known.targets.items() if key in keys and known.patterns[name] is None}
    return direct, tuple(key for key in keys if key not in direct)


def _saved(model: OpenModel, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Tensors that are stored otherwise, together, as transformers would write them."""
    try:
        return list(saved_names(model.partial.model, dict(tensors))) if tensors else []
    except Exception as error:  # a conversion that takes more than these raises what it likes
        raise _unknown_storage(next(iter(tensors))) from error


def _plain_dtype(model: OpenModel, key: str, name: str, value: Tensor) -> torch.dtype:
    info = model.checkpoint.tensors.get(name)
    alike = info is not None and info.shape == tuple(value.shape)
    dtype = TORCH_DTYPES.get(info.dtype, torch.int8) if info is not None else torch.int8
    if alike and dtype.is_floating_point and dtype.itemsize > 1:
        return dtype
    if model.layout.quantized:
        raise CompressionError(
            f"tensor {name!r} is stored quantised, so nothing can be trained into it; distill the model before it is "
            "quantised, or train what is not, as the option train: router does"
        )
    raise _unknown_storage(key)


def _unknown_storage(key: str) -> CompressionError:
    return CompressionError(
        f"{key} is not stored as transformers would write it, so it cannot be written back; load the checkpoint with "
        "transformers and save it anew"
    )
