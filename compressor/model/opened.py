"""An opened model: checkpoint, config, architecture, partial model and storage layout belong
together."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from compressor.checkpoint.reader import TORCH_DTYPES, Checkpoint
from compressor.checkpoint.source import ModelSource
from compressor.devices import free_memory, pick_device
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.formatting import human_bytes
from compressor.model.architecture import Architecture, discover, head_of, load_config, run_any_rows
from compressor.model.constant_experts import NOT_STOCK, SubstitutedCheckpoint, declared
from compressor.model.experts import fills_rows, width_of
from compressor.model.layout import Layout, find_layout
from compressor.model.loading import PartialModel
from compressor.model.moe_layer import MoeLayer, counts_below
from compressor.model.serving import Advice, Served, advise

logger = logging.getLogger(__name__)

SPARE = 0.2  # share of a device's free memory kept for hidden states and the computation of layers
TIED = "tie_word_embeddings"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NARROWED = {torch.float64: torch.float32}  # as no kernel of experts computes in it


def pick_dtype(name: str, config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype for computing; `auto` is the checkpoint's dtype, or bfloat16 if it is
    quantised."""
    if name != "auto":
        if name not in DTYPES:
            raise CompressionError(
                f"there is no dtype {name!r}; known are auto, {', '.join(DTYPES)}"
            )
        return DTYPES[name]
    names = ["BF16", "F16"]
    otherwise = torch.bfloat16
    if not checkpoint.quantization:
        for node in (config, config.get_text_config()):
            if isinstance(getattr(node, "dtype", None), torch.dtype):
                return NARROWED.get(node.dtype, node.dtype)  # type: ignore[no-any-return]
        names = ["BF16", "F16", "F32"]
        otherwise = torch.float32
    stored = [info.dtype for info in checkpoint.tensors.values()]
    commonest = max(names, key=stored.count)
    return TORCH_DTYPES[commonest] if commonest in stored else otherwise


@dataclass(frozen=True)
class OpenModel:
    """Everything known of a model before a weight is read."""

    source: ModelSource
    checkpoint: Checkpoint
    config: Any
    architecture: Architecture
    partial: PartialModel
    layout: Layout
    # the stored model that this is a view of: with experts split, or another top-k
    whole: "OpenModel | None" = None
    split: Mapping[str, Any] | None = None  # the split in a plan, once neurons are in order
    # how parts are cut from quantised tensors (`steps.split.quantized`), if any are
    stored_parts: Any = None
    top_k: int | None = None  # the top-k of smaller models if it is not the view's
    # results that others reuse
    cached: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        source: ModelSource,
        checkpoint: Checkpoint,
        config: Any,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Return the stock model of a config and a checkpoint; raise `CompressionError` if they are
        unfit."""
        partial = PartialModel(checkpoint, config, dtype, device)
        architecture = discover(config, partial.model)
        if partial.ties_nothing:
            paths = [TIED]
            for name, node in checkpoint.raw_config.items():
                if isinstance(node, dict) and node.get(TIED):
                    paths.append(f"{name}.{TIED}")
            architecture = replace(architecture, written=dict.fromkeys(paths, False))
        layout = find_layout(checkpoint, architecture, partial)
        return cls(source, checkpoint, config, architecture, partial, layout)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over each stored tensor's name, dtype and shape, and over the bytes of all
        routers."""
        stored = sorted(
            (info.name, info.dtype, info.shape) for info in self.checkpoint.tensors.values()
        )
        digest = hashlib.sha256(json.dumps(stored).encode())
        routers = self.checkpoint.read_all(
            name for name, role in self.layout.roles.items() if role.is_router
        )
        self.cached["routers"] = routers  # in use, so not read again
        for name in sorted(routers):
            digest.update(routers[name].reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def dtype_name(self) -> str:
        """The dtype for computing, as options and plans name it."""
        return str(self.partial.dtype).removeprefix("torch.")

    @property
    def is_split(self) -> bool:
        """True if each expert of the stored model is seen as several."""
        whole = self.whole
        return whole is not None and whole.architecture.experts != self.architecture.experts

    @property
    def largest_layer(self) -> int:
        """Bytes of the largest decoder layer in the dtype for computing."""
        sizes = list[int]()
        for decoder_layer in self.architecture.decoder_layers:
            keys = self.partial.keys_under(decoder_layer)
            sizes.append(sum(self.partial.empty[key].nbytes for key in keys))
        return max(sizes)

    @property
    def vocabulary(self) -> int:
        """Rows of the token embedding."""
        return int(self.partial.model.get_input_embeddings().weight.shape[0])

    @property
    def positions(self) -> int | None:
        """The positions that the model was made for; None if its config has no limit."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None


def open_model(
    source: ModelSource, dtype: str = "auto", device: str = "auto", resident: str = "no"
) -> OpenModel:
    """Open a checkpoint lazily; raise `CompressionError` if it is unfit.

    With `resident` "yes", or "auto" if the model fits, loaded tensors stay on the device.
    """
    if resident not in ("auto", "yes", "no"):
        raise CompressionError(f"--resident {resident!r} is not known; give auto, yes or no")
    opened = open_checkpoint(source, Checkpoint(source.folder), dtype, device)
    opened.partial.resident = resident == "yes" or (resident == "auto" and fits(opened))
    return opened


def open_substituted(source: ModelSource, dtype: str = "auto", device: str = "auto") -> OpenModel:
    """Open a checkpoint in which constants stand for experts; its `checkpoint` is a
    `SubstitutedCheckpoint`."""
    return open_checkpoint(source, SubstitutedCheckpoint(source.folder), dtype, device)


def open_checkpoint(
    source: ModelSource, checkpoint: Checkpoint, dtype: str, device: str
) -> OpenModel:
    """Return the model of a checkpoint whose headers have been read.

    Constants for experts are refused unless it is a `SubstitutedCheckpoint`.
    """
    if declared(checkpoint.raw_config) and not isinstance(checkpoint, SubstitutedCheckpoint):
        raise CompressionError(
            f"{source.label} cannot be used: {NOT_STOCK}; name the checkpoint that it was made of"
        )
    config = load_config(source.folder)
    opened = OpenModel.of(
        source, checkpoint, config, pick_dtype(dtype, config, checkpoint), pick_device(device)
    )
    missing = opened.partial.missing
    if missing:  # which stock transformers would draw at random
        raise CompressionError(
            f"{source.folder} lacks {len(missing)} tensors that {opened.architecture.model_class} "
            f"needs, such as {missing[0]!r}; download or save it again"
        )
    return opened


def open_alike(source: ModelSource, model: OpenModel) -> OpenModel:
    """Open a checkpoint in the dtype and on the device of another model, resident if that one is
    and both fit."""
    opened = open_model(source, model.dtype_name, str(model.partial.device))
    stored = (model.whole or model).partial
    opened.partial.resident = stored.resident and fits(opened, stored.unread)
    return opened


def fits(model: OpenModel, promised: int = 0) -> bool:
    """Return True if a model can stay on its device, beside `promised` bytes of another model and
    two layers."""
    budget = memory_budget(model.partial.device)
    needed = model.partial.nbytes + promised + 2 * model.largest_layer
    return budget is not None and needed <= budget


def memory_budget(device: torch.device) -> float | None:
    """Return the bytes that weights may take on a device; None if unknown. Ranks on a machine share
    its memory."""
    free = free_memory(device)
    if free is None:
        return None
    return (1 - SPARE) * free / (ranks().size if device.type == "cpu" else 1)


def how_resident(model: OpenModel) -> str:
    """Return a sentence on the device and memory of a model."""
    partial = model.partial
    free = free_memory(partial.device)
    if partial.resident:
        return f"keeping {human_bytes(partial.nbytes)} on {partial.device}"
    known = "" if free is None else f", {human_bytes(free)} free"
    return f"one layer at a time on {partial.device}: {human_bytes(partial.nbytes)}{known}"


def shared_experts(model: OpenModel) -> str | None:
    """Return a layer that shares expert tensors with another one, if any: it can't change before
    the other has run."""
    tied = {*model.partial.tied, *model.partial.tied.values()}
    for layer in model.architecture.layers:
        if any(tensor.key in tied for tensor in layer.tensors):
            return layer.name
    return None


def refuse_shared_experts(model: OpenModel) -> None:
    """Refuse a model that cannot be compressed in order."""
    shared = shared_experts(model)
    if shared:
        raise CompressionError(
            f"{shared} shares its experts with another layer, so it cannot be compressed in "
            "order; use --correct none and leave out --sequential"
        )


def served_model(model: OpenModel) -> Served:
    """Return an opened model as servers see it."""
    layer = model.architecture.layers[0]
    stock = model.partial.model
    experts = stock.get_submodule(layer.name)
    head = getattr(head_of(stock), "weight", None)
    tied = {*model.partial.tied, *model.partial.tied.values()}
    quantization = model.checkpoint.quantization
    blocks = quantization.get("weight_block_size")
    dtype = pick_dtype("auto", model.config, model.checkpoint)
    router = [
        tensor.key.rpartition(".")[2]
        for tensor in layer.tensors
        if not tensor.key.startswith(f"{layer.name}.")
    ]
    return Served(
        model.architecture.family,
        layer.experts,
        layer.top_k,
        width_of(experts),
        groups=layer.routing_groups,
        chosen_groups=layer.chosen_groups,
        # beside the bias of its logits
        selection_bias=any("bias" in name and name != "bias" for name in router),
        tied=any(stock.get_parameter_or_buffer(key) is head for key in tied),
        quantization=str(quantization.get("quant_method")) if quantization else "",
        block=blocks[0] if isinstance(blocks, list) and blocks else 0,
        aligned=fills_rows(experts, dtype.itemsize),
    )


def advice_on(served: Served, layers: Sequence[MoeLayer], experts: int) -> Advice:
    """Advice on a model that keeps `experts` of its `layers`; `served` has its top-k, width and the
    rest."""
    return advise(replace(served, experts=experts), counts_below(layers))


def load_whole(folder: Path, kind: Any = AutoModelForCausalLM, **settings: Any) -> Any:
    """Return a model of this class with `from_pretrained`'s settings, on the CPU unless they say
    otherwise.

    A quantised one is dequantised, as stock loaders don't read all formats rightly. Raises
    `CompressionError` for a checkpoint that lacks weights: they would be random."""
    if Checkpoint(folder).quantization:
        dtype = str(settings.get("dtype", "auto")).removeprefix("torch.")
        device = str(settings.get("device_map", {"": "cpu"})[""])
        partial = open_model(ModelSource.of(folder), dtype, device).partial
        partial.load(partial.empty)
        with suppress(OSError):
            partial.model.generation_config = GenerationConfig.from_pretrained(str(folder))
        return partial.model
    settings["config"] = load_config(folder)  # without names of kernels
    model, info = kind.from_pretrained(str(folder), output_loading_info=True, **settings)
    absent = sorted(info["missing_keys"])
    absent += sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if absent:
        raise CompressionError(
            f"{folder.name} lacks {len(absent)} tensors that its config asks for, such as "
            f"{absent[0]!r}; download or write it again"
        )
    run_any_rows(model)
    return model
