"""A model in memory as the source of a run: a copy of it as files for what is read as bytes, itself to compute with.

Importing this module loads no torch, for recipes name it.
"""

import copy
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.distributed import refuse_several
from compressor.errors import CompressionError
from compressor.files import file_digest, wrap_full_disk
from compressor.progress import Progress

if TYPE_CHECKING:
    from compressor.checkpoint.source import ModelSource
    from compressor.model.opened import OpenModel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that stock transformers has built or loaded, with its tokenizer or processor; neither is changed."""

    model: Any
    tokenizer: Any

    def __post_init__(self) -> None:
        from transformers import PreTrainedModel

        if not isinstance(self.model, PreTrainedModel):
            kind = type(self.model).__name__
            raise CompressionError(
                f"a {kind} is no model of transformers; give a folder, a Hub id or a PreTrainedModel, and merge "
                "adapters into it before (merge_and_unload)"
            )
        if self.tokenizer is None:
            raise CompressionError("a model in memory has no tokenizer; pass tokenizer=")
        adapted, quantised = self.model._hf_peft_config_loaded, hasattr(self.model, "hf_quantizer")
        if adapted or quantised or any(value.is_meta for value in self.model.parameters()):
            what = "has adapters" if adapted else "is quantised" if quantised else "is not whole in memory"
            raise CompressionError(f"the model {what}; give its folder or Hub id instead")

    @property
    def name(self) -> str:
        """What it is called: the last part of what it was loaded from, or its class."""
        loaded_from = Path(str(getattr(self.model.config, "_name_or_path", "") or "")).name
        return re.sub(r"[^\w.-]", "_", loaded_from).lstrip(".") or type(self.model).__name__

    @contextmanager
    def saved(self) -> Iterator["ModelSource"]:
        """Write it as a checkpoint into the temporary folder, a decoder layer at a time, for as long as the block."""
        from compressor.checkpoint.source import ModelSource

        refuse_several("reading a model in memory", "name its folder or Hub id")
        with tempfile.TemporaryDirectory(prefix="moe-compress-") as place:
            folder = Path(place).resolve() / self.name
            self.tokenizer.save_pretrained(folder)
            with wrap_full_disk(folder):
                self._write(folder)
            yield ModelSource(str(folder), None, folder)

    def _write(self, folder: Path) -> None:
        from safetensors.torch import save_file

        from compressor.checkpoint.reader import INDEX_NAME
        from compressor.model.architecture import build_meta, decoder_layers, model_class
        from compressor.model.loading import saved_names

        model, config = self.model, copy.deepcopy(self.model.config)
        config.architectures, config.dtype = [type(model).__name__], model.dtype
        config.architectures = [model_class(config).__name__]  # of a subclass the stock one
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        stock, state = build_meta(config), model.state_dict()
        units, weight_map = decoder_layers(stock), dict[str, str]()
        left_out = {*(stock.all_tied_weights_keys or ()), *(stock._keys_to_ignore_on_save or ())}
        owners = {key: next((u for u in units if key.startswith(f"{u}.")), "") for key in state.keys() - left_out}
        for number, unit in enumerate(("", *units)):
            own = {key: value for key, value in state.items() if owners.get(key) == unit}
            tensors = {name: value.detach().cpu().clone().contiguous() for name, value in saved_names(stock, own)}
            path = folder / f"model-{number:05d}.safetensors"
            save_file(tensors, path, {"format": "pt"})
            # a run goes on if the weights are the same: their time of change stands for their content
            os.utime(path, ns=(0, int(file_digest(path)[:15], 16)))
            weight_map |= dict.fromkeys(tensors, path.name)
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def given(model: Any, tokenizer: Any = None) -> str | LoadedModel:
    """What a caller names as a model: a folder, a Hub id, or a model in memory."""
    if isinstance(model, str | Path):
        return str(model)
    return model if isinstance(model, LoadedModel) else LoadedModel(model, tokenizer)


@contextmanager
def opened(
    model: str | LoadedModel,
    revision: str | None,
    dtype: str,
    device: str,
    progress: Progress | None = None,
    resident: str = "no",
) -> Iterator["OpenModel"]:
    """Open a model, wherever it is. One in memory computes where it is, with its own tensors."""
    from compressor.checkpoint.source import find_model
    from compressor.model.opened import open_model

    if isinstance(model, str):
        yield open_model(find_model(model, revision, progress), dtype, device, resident)
        return
    with model.saved() as source:
        place = str(model.model.device) if device == "auto" else device
        found = open_model(source, dtype, place, resident)
        if resident != "no":
            found.partial.adopt(model.model.state_dict())
        yield found
