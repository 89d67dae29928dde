"""From trained tensors of the model back to those of the checkpoint: the same one, or several that it is made of."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compressor.checkpoint.headers import TORCH_DTYPES
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.surgery.conversion import saved_names
from compressor.surgery.tensors import refuse_overflow


def stored_dtypes(model: OpenModel, keys: Sequence[str]) -> dict[str, torch.dtype]:
    """The dtype in which each of these tensors of the model is stored, by state-dict key.

    Raises `CompressionError` for one that is stored quantised, or in a way that transformers would not write.
    """
    whole, found = {key: model.partial.empty[key] for key in keys}, dict[str, torch.dtype]()
    for names in _names(model, whole):
        for key, tensors in names.items():
            dtypes = {_plain_dtype(model, key, name, tuple(shape)) for name, shape in tensors.items()}
            if len(dtypes) > 1:
                raise CompressionError(f"{key} is stored in several dtypes, so it cannot be written back; convert it")
            found[key] = dtypes.pop()
    return found


def stored_tensors(
    model: OpenModel, values: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Trained tensors by the names and in the dtypes of the checkpoint."""
    made = {key: refuse_overflow(key, value.to(dtypes[key])) for key, value in values.items()}
    direct = _direct(model, made)
    found = {direct[key]: value for key, value in made.items() if key in direct}
    for key, value in made.items():
        if key not in direct:
            found.update((name, own.contiguous()) for name, own in saved_names(model.partial.model, {key: value}))
    return found


def _direct(model: OpenModel, keys: Mapping[str, Tensor]) -> dict[str, str]:
    """The stored tensor of each key that is stored as one, as the model has it."""
    known = model.partial.keys
    return {key: name for name, key in known.targets.items() if key in keys and known.patterns[name] is None}


def _names(model: OpenModel, empty: Mapping[str, Tensor]) -> list[dict[str, dict[str, torch.Size]]]:
    """Stored names and shapes by key."""
    direct, found = _direct(model, empty), list[dict[str, dict[str, torch.Size]]]()
    for key, value in empty.items():
        try:
            saved = {direct[key]: value} if key in direct else dict(saved_names(model.partial.model, {key: value}))
        except Exception as error:  # a conversion that takes more than this tensor raises what it likes
            raise _unknown_storage(key) from error
        found.append({key: {name: own.shape for name, own in saved.items()}})
    return found


def _plain_dtype(model: OpenModel, key: str, name: str, shape: tuple[int, ...]) -> torch.dtype:
    info = model.checkpoint.tensors.get(name)
    if info is None or (info.shape != shape and not model.layout.quantized):
        raise _unknown_storage(key)
    dtype = TORCH_DTYPES.get(info.dtype, torch.int8)
    if model.layout.quantized and (info.shape != shape or not dtype.is_floating_point or dtype.itemsize < 2):
        raise CompressionError(
            f"tensor {name!r} is stored quantised, so nothing can be trained into it; recover the model before it is "
            "quantised, or choose --method router"
        )
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise CompressionError(f"tensor {name!r} is stored as {info.dtype}, so nothing can be trained into it")
    return dtype


def _unknown_storage(key: str) -> CompressionError:
    return CompressionError(
        f"{key} is not stored as transformers would write it, so it cannot be written back; load the checkpoint with "
        "transformers and save it anew"
    )
