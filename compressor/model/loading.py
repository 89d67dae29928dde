"""Loading parts of a checkpoint into the stock model on meta, through transformers' own weight conversion."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compressor.checkpoint.quantized import dequantizer, refuse_faults, refuse_unread_scales
from compressor.checkpoint.reader import Checkpoint
from compressor.errors import CompressionError
from compressor.model.ahead import ReadAhead
from compressor.model.architecture import build_meta
from compressor.model.bounds import most_parts, refuse_unfilled
from compressor.progress import quiet_transformers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyMap:
    """Which model tensor each checkpoint tensor goes to, and by which conversion pattern (None: a plain rename)."""

    targets: dict[str, str]  # checkpoint name -> state-dict name (the first one, where a conversion makes several)
    patterns: dict[str, str | None]
    unknown: tuple[str, ...]  # checkpoint tensors that the stock model does not load


def map_keys(names: Iterable[str], model: Any, conversions: list[Any]) -> KeyMap:
    """Rename checkpoint names as transformers' loader would for `model`."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    targets: dict[str, str] = {}
    patterns: dict[str, str | None] = {}
    unknown = []
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if target in state:
            targets[name], patterns[name] = target, pattern
        else:
            unknown.append(name)
    return KeyMap(targets, patterns, tuple(sorted(unknown)))


def parent_and_name(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The module that owns a parameter or buffer, and the attribute's name there."""
    module_name, _, name = key.rpartition(".")
    return model.get_submodule(module_name), name


def set_tensor(model: nn.Module, key: str, value: torch.Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer."""
    module, name = parent_and_name(model, key)
    if name not in module._parameters:
        module._buffers[name] = value
    else:
        kept = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
        module._parameters[name] = kept


def load_converted(model: Any, tensors: dict[str, torch.Tensor], device: Any, conversions: Any, **more: Any) -> Any:
    """Have the stock loader convert stored tensors and put them into the model; returns its report."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    load_config = LoadStateDictConfig(device_map={"": device}, weight_mapping=conversions, **more)
    with quiet_transformers():
        return convert_and_load_state_dict_in_model(model, tensors, load_config)[0]


class PartialModel:
    """The stock model on meta, whose parts are filled from the checkpoint and emptied again."""

    def __init__(self, checkpoint: Checkpoint, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.checkpoint, self.config, self.dtype, self.device = checkpoint, config, dtype, device
        self.model = build_meta(config, dtype, most_parts(checkpoint))
        refuse_unfilled(checkpoint, self.model)
        self.quantizer = dequantizer(config)
        self.empty = {key: value.detach() for key, value in self.model.state_dict().items()}
        self.plain_conversions = self.conversions = get_model_conversion_mapping(self.model, None, self.quantizer)
        self.plain_keys = self.keys = map_keys(checkpoint, self.model, self.conversions)
        if self.quantizer is not None:
            refuse_unread_scales(self.quantizer, {name: self.keys.targets.get(name) for name in checkpoint})
            self.plain_conversions = get_model_conversion_mapping(self.model)
            self.plain_keys = map_keys(checkpoint, self.model, self.plain_conversions)
        self.tied: dict[str, str] = dict(getattr(self.model, "all_tied_weights_keys", None) or {})
        self._sources: dict[str, list[str]] = {}
        for name, target in self.keys.targets.items():
            self._sources.setdefault(target, []).append(name)
        self._loaded = set[str]()
        self.ahead = ReadAhead(checkpoint, device)
        self._fill_constant_buffers()

    def computing_in(self, dtype: torch.dtype, device: torch.device) -> "PartialModel":
        """The same model, empty, in another dtype or on another device; itself if it is in both."""
        alike = (self.dtype, self.device) == (dtype, device)
        return self if alike else PartialModel(self.checkpoint, self.config, dtype, device)

    def _fill_constant_buffers(self) -> None:
        """Compute the buffers that no checkpoint holds (rotary frequencies), as the stock loader does."""
        from transformers import PreTrainedModel
        from transformers.initialization import guard_torch_init_functions

        owners = [(name, module) for name, module in self.model.named_modules() if isinstance(module, PreTrainedModel)]
        with torch.no_grad(), guard_torch_init_functions():
            for name, module in self.model.named_modules():
                own = [key for key in module._non_persistent_buffers_set if module._buffers.get(key) is not None]
                if not own:
                    continue
                for key in own:
                    module._buffers[key] = torch.empty_like(module._buffers[key], device="cpu")
                inside = [pair for pair in owners if pair[0] == "" or f"{name}.".startswith(f"{pair[0]}.")]
                max(inside, key=lambda pair: len(pair[0]))[1]._init_weights(module)
                for key in own:
                    module._buffers[key] = module._buffers[key].to(self.device)

    def keys_under(self, module_name: str) -> list[str]:
        """State-dict keys inside a module."""
        prefix = f"{module_name}." if module_name else ""
        return [key for key in self.empty if key.startswith(prefix)]

    def load(self, keys: Iterable[str]) -> None:
        """Fill these state-dict entries; raises `CompressionError` for NaN, a missing tensor or a wrong shape."""
        wanted = [key for key in keys if key not in self._loaded]
        if not wanted:
            return
        first_targets = self._first_targets(wanted)
        names = self._names_of(first_targets)
        tensors = self.ahead.take(names)
        # the largest first and by itself: while it is put together, nothing else need be in memory
        largest = max(first_targets, key=lambda target: self.empty[target].numel(), default=None)
        for alone in (True, False):
            stored = {name: tensors.pop(name) for name in names if (self.keys.targets[name] == largest) is alone}
            plan = self.model._get_dtype_plan(self.dtype)
            more = {"dtype": self.dtype, "dtype_plan": plan, "hf_quantizer": self.quantizer}
            refuse_faults(load_converted(self.model, stored, self.device, self.conversions, **more))
        self._settle(wanted)

    def read_ahead(self, keys: Iterable[str]) -> None:
        """Have a thread read what `load` of these entries will need, while this one computes."""
        self.ahead.begin(self._names_of(self._first_targets(key for key in keys if key not in self._loaded)))

    def _names_of(self, targets: Iterable[str]) -> list[str]:
        return [name for target in targets for name in self._sources.get(target, ())]

    def _first_targets(self, keys: Iterable[str]) -> set[str]:
        """Targets under which the loader files the tensors of `keys`: of a one-to-many conversion, the first."""
        sources = {self.tied.get(key, key) for key in keys}
        direct = sources & self._sources.keys()
        parents = tuple(f"{key.rpartition('.')[0].rpartition('.')[0]}." for key in sources - direct)
        return direct | {key for key in self._sources if key.startswith(parents) and key not in self._loaded}

    def _settle(self, wanted: list[str]) -> None:
        """Share tied tensors and check that everything asked for has arrived."""
        state = self.model.state_dict()
        for key in wanted:
            source = self.tied.get(key, key)
            if state[source].device.type == "meta":
                raise CompressionError(
                    f"tensor {source!r} is missing from the checkpoint {self.checkpoint.folder}; download it again"
                )
            getattr(*parent_and_name(self.model, source)).requires_grad_(False)  # only what is asked for has gradients
            if key != source:
                set_tensor(self.model, key, getattr(*parent_and_name(self.model, source)))
            self._loaded |= {key, source}

    def release(self, module_name: str) -> None:
        """Send a module's tensors back to meta; with "" all of them, and nothing is read ahead any more."""
        if not module_name:
            self.ahead.stop()
        for key in self.keys_under(module_name):
            if key in self._loaded:
                for entry in {key, self.tied.get(key, key)}:
                    set_tensor(self.model, entry, self.empty[entry])
                    self._loaded.discard(entry)
