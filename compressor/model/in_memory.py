"""Opening a model on disk, on the Hub, or in memory; one in memory is also written to a temporary
folder."""

import copy
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compressor.checkpoint.quantized import wanted_dtype
from compressor.checkpoint.reader import refuse_nan
from compressor.checkpoint.source import ModelSource, find_model
from compressor.distributed import refuse_several
from compressor.files import file_digest, wrap_full_disk
from compressor.model.architecture import build_meta, model_class
from compressor.model.loaded import LoadedModel
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Progress, quiet_transformers


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
        config = copy.deepcopy(model.model.config)
        config.architectures = [type(model.model).__name__]
        config.dtype = model.model.dtype
        config.architectures = [model_class(config).__name__]  # the stock class of a subclass
        with wrap_full_disk(folder), quiet_transformers():
            stock = build_meta(config)
            stock.save_pretrained(folder, state_dict=model.model.state_dict(), max_shard_size="1GB")
            config.save_pretrained(folder)
            if model.model.can_generate():
                model.model.generation_config.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):
            # an interrupted run resumes if the weights have not changed: the time of change stands
            # for their content
            os.utime(path, ns=(0, int(file_digest(path)[:15], 16)))
        computing = str(model.model.device) if device == "auto" else device
        view = open_model(ModelSource.of(folder), dtype, computing, resident)
        if resident != "no":  # keep its tensors that are on the device and in the right dtype
            partial = view.partial
            partial.resident = True
            for key, value in model.model.state_dict().items():
                if key not in partial.empty or key in partial.tied:
                    continue
                computed_in = wanted_dtype(partial.model, key)
                wanted = (partial.empty[key].shape, partial.device, computed_in)
                if (value.shape, value.device, value.dtype) == wanted:
                    refuse_nan(key, "the model in memory", value)
                    partial.kept[key] = value.detach()
        yield view
