"""Opening a model on disk, on the Hub, or in memory; one in memory is also written to a temporary
folder."""

import copy
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from compressor.checkpoint.reader import INDEX_NAME
from compressor.checkpoint.source import ModelSource, find_model
from compressor.distributed import refuse_several
from compressor.files import file_digest, wrap_full_disk
from compressor.model.architecture import build_meta, decoder_layers, model_class
from compressor.model.loaded import LoadedModel
from compressor.model.loading import saved_names, tied_weights
from compressor.model.moe_layer import decoder_layer_of
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Progress


@contextmanager
def opened(
    model: str | LoadedModel,
    revision: str | None,
    dtype: str,
    device: str,
    progress: Progress | None = None,
    resident: str = "no",
) -> Iterator[OpenModel]:
    """Open a model; one in memory computes on its own device with its own tensors."""
    if isinstance(model, str):
        yield open_model(find_model(model, revision, progress), dtype, device, resident)
        return
    refuse_several("reading a model in memory", "name its folder or Hub id")
    with tempfile.TemporaryDirectory(prefix="moe-compress-") as temporary:
        folder = Path(temporary).resolve() / model.name
        model.tokenizer.save_pretrained(folder)
        with wrap_full_disk(folder):
            _write(model.model, folder)
        computing = str(model.model.device) if device == "auto" else device
        view = open_model(ModelSource(str(folder), None, folder), dtype, computing, resident)
        if resident != "no":
            view.partial.adopt(model.model.state_dict())
        yield view


def _write(model: Any, folder: Path) -> None:
    """Write a model as a checkpoint, a decoder layer at a time."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.architectures = [model_class(config).__name__]  # the stock class of a subclass
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    stock = build_meta(config)
    state = model.state_dict()
    layer_names = decoder_layers(stock)

    def alike(first: str, second: str) -> bool:
        return torch.equal(state[first], state[second])

    left_out = {*tied_weights(stock, state.keys(), alike), *(stock._keys_to_ignore_on_save or ())}
    by_decoder_layer: dict[str, dict[str, Tensor]] = {
        decoder_layer: {} for decoder_layer in ("", *layer_names)
    }
    for key, value in state.items():
        if key not in left_out:
            by_decoder_layer[decoder_layer_of(key, layer_names)][key] = value
    weight_map = dict[str, str]()
    for number, values in enumerate(by_decoder_layer.values()):
        stored = saved_names(stock, values)
        tensors = {name: value.detach().cpu().clone().contiguous() for name, value in stored}
        path = folder / f"model-{number:05d}.safetensors"
        save_file(tensors, path, {"format": "pt"})
        # an interrupted run resumes if the weights have not changed: the time of change stands for
        # their content
        os.utime(path, ns=(0, int(file_digest(path)[:15], 16)))
        weight_map |= dict.fromkeys(tensors, path.name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
