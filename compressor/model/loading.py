"""Loading parts of a checkpoint into the stock model on meta, by transformers' own weight
conversion.

On a device with streams, a thread copies the stored tensors of the next layer while this one
computes (`ReadAhead`)."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import guard_torch_init_functions
from transformers.modeling_utils import LoadStateDictConfig

from compressor.checkpoint.quantized import dequantizer, refuse_unread_scales, refuse_unscaled
from compressor.checkpoint.reader import DTYPE_BITS, Checkpoint, refuse_nan
from compressor.devices import free_memory
from compressor.errors import CompressionError, reason_of
from compressor.frozen import frozen
from compressor.memory import give_back
from compressor.model.architecture import build_meta
from compressor.model.moe_layer import decoder_layer_of
from compressor.model.single_experts import single_experts
from compressor.progress import quiet_transformers

STAGE = 2**25  # bytes pinned at once
WRAPPERS = {  # tools by the module that they put around a model or a part of it
    "module": "DataParallel or DeepSpeed",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "base_model.model": "peft",
    "base_layer": "peft",
}
SAMPLES = 64  # unknown names examined
MLX = ".switch_mlp."  # occurs in the names of MLX's experts
SHARE = 2  # read ahead only if this many times its bytes are free


class Copier:
    """Copies to a device with streams; each method is a point that orders them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream(device)

    def room(self) -> int | None:
        """Return the free bytes of the device, if known."""
        return free_memory(self.device)

    def copying(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread uses the copying stream."""
        return self.module.stream(self.stream)  # type: ignore[no-any-return]

    def copy(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor through pinned pieces, which torch reuses after the device has
        read them."""
        target = torch.empty_like(tensor, device=self.device)
        if tensor.numel() == 0:
            return target
        stored = tensor.view(-1).view(torch.uint8).split(STAGE)
        copied = target.view(-1).view(torch.uint8).split(STAGE)
        for source, sink in zip(stored, copied, strict=True):
            sink.copy_(source.pin_memory(), non_blocking=True)
        return target

    def mark(self) -> Any:
        """Return an event after everything queued on this thread's stream so far."""
        return self.module.current_stream(self.device).record_event()

    def hand_over(self, done: Any, tensors: Iterable[Tensor]) -> None:
        """Have this thread's stream wait for `done` before it uses tensors, whose memory is kept
        until it has."""
        stream = self.module.current_stream(self.device)
        stream.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(stream)


class ReadAhead:
    """Reads a checkpoint's tensors; on a device with streams, a thread reads announced ones ahead.

    Each is checked for NaN once. Tensors are views of files, or on the device if they were read
    ahead."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint = checkpoint
        streams = device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")
        self.copier: Any = Copier(device) if streams else None
        self.checked = set[str]()
        self.views = dict[str, Tensor]()  # of the tensors being read ahead
        self._pool: ThreadPoolExecutor | None = None  # of one thread, for one task
        self._task: Future[tuple[dict[str, Tensor], Any]]
        self._names = set[str]()

    def begin(self, names: Iterable[str]) -> None:
        """Have a thread copy these tensors to the device if they fit, in place of those announced
        before."""
        self.stop()
        self._names = set(names)
        if self.copier is None or not self._names:
            return
        needed = SHARE * sum(self.checkpoint.tensors[name].nbytes for name in self._names)
        room = self.copier.room()
        if room is None or room >= needed:
            self._pool = ThreadPoolExecutor(1, "reading ahead")
            self._task = self._pool.submit(self._read, self.copier.mark())

    def take(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return these tensors, as views of files or on the device; raise `CompressionError` for
        NaN.

        Tensors being read ahead are waited for and kept no longer; the others are read now.
        """
        wanted = list(names)
        tensors = {}
        if self._pool is not None and not self._names.isdisjoint(wanted):
            self._pool.shutdown()
            ahead, copied = self._task.result()
            tensors = {name: ahead.pop(name) for name in wanted if name in ahead}
            if tensors:
                self.copier.hand_over(copied, tensors.values())
        read = self.checkpoint.read_all([name for name in wanted if name not in tensors])
        self.check(read)
        return tensors | read

    def stop(self) -> None:
        """End the thread, if there is one, and drop the tensors that it has read."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            del self._task
            self.views = {}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `CompressionError` naming a tensor that holds a NaN."""
        for name, tensor in tensors.items():
            if name not in self.checked:
                refuse_nan(name, self.checkpoint.tensors[name].file, tensor)
                self.checked.add(name)

    def _read(self, computed: Any) -> tuple[dict[str, Tensor], Any]:
        tensors = {}
        try:
            with self.copier.copying():
                computed.synchronize()  # until then, the memory of earlier work is not free
                self.views = self.checkpoint.read_all(self._names)
                for name, tensor in self.views.items():
                    self.check({name: tensor})
                    tensors[name] = self.copier.copy(tensor)
                return tensors, self.copier.mark()
        except torch.OutOfMemoryError:
            return {}, None  # `take` reads them when memory has become free


@frozen
class KeyMap:
    """The model tensor that each stored tensor fills, and its conversion pattern."""

    # stored name -> state-dict name, the first one if a conversion makes several
    targets: dict[str, str]
    patterns: dict[str, str | None]  # by stored name; None for a plain rename
    unknown: list[str]  # stored tensors that the stock model does not load, in order

    sources: dict[str, list[str]]  # the stored tensors of each state-dict entry


def map_keys(names: Iterable[str], model: Any, conversions: list[Any]) -> KeyMap:
    """Map stored names as transformers' loader does for `model`."""
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    prefix = model.base_model_prefix
    keys = KeyMap({}, {}, [], {})
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in state:
            keys.targets[name] = target
            keys.patterns[name] = pattern
            keys.sources.setdefault(target, []).append(name)
        else:
            keys.unknown.append(name)
    keys.unknown.sort()
    return keys


def tied_weights(
    model: Any, stored: Collection[str], alike: Callable[[str, str], bool]
) -> dict[str, str]:
    """Return the entries that take their weights from another one, and that one, as stock
    transformers ties them.

    Of those that the config ties, the first that is `stored` gives its weights; other stored ones
    keep theirs unless they are `alike`."""
    groups = defaultdict(list)
    for target, source in model.all_tied_weights_keys.items():
        groups[source].append(target)
    tied = {}
    for source, targets in groups.items():
        group = [source, *targets]
        giver = next((key for key in group if key in stored), group[0])
        for key in group:
            if key != giver and (key not in stored or alike(key, giver)):
                tied[key] = giver
    return tied


def set_tensor(model: nn.Module, key: str, value: Tensor) -> None:
    """Replace a parameter or buffer by a tensor."""
    module_name, _, name = key.rpartition(".")
    module = model.get_submodule(module_name)
    if name in module._parameters and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=False)
    setattr(module, name, value)


def load_converted(
    model: Any, tensors: dict[str, Tensor], device: Any, conversions: Any, **more: Any
) -> Any:
    """Load stored tensors into the model by the stock loader; return its report."""
    load_config = LoadStateDictConfig(device_map={"": device}, weight_mapping=conversions, **more)
    with quiet_transformers():
        return convert_and_load_state_dict_in_model(model, tensors, load_config)[0]


def saved_names(model: Any, state: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Return a model's tensors under the names and in the shapes that stock `save_pretrained`
    writes."""
    with quiet_transformers():
        reverted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return reverted.items()


def refuse_misfits(checkpoint: Checkpoint) -> None:
    """Refuse a packed weight whose width does not fit the config's bits and the groups of its
    scales."""
    declared = []
    for group in (checkpoint.quantization.get("config_groups") or {}).values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if weights:
            bits = weights.get("num_bits")
            size = weights.get("group_size")
            if not isinstance(bits, int) or not isinstance(size, int) or size <= 0:
                return
            declared.append((bits, size))
    declared = declared or [(4, 16)]  # modelopt's NVFP4
    for name, info in checkpoint.tensors.items():
        weight = name.removesuffix("_packed")
        is_packed = weight != name or (
            info.dtype == "U8" and f"{name}_scale_2" in checkpoint.tensors
        )
        scale = checkpoint.tensors.get(f"{weight}_scale")
        if not is_packed or scale is None or not scale.shape:
            continue
        word = DTYPE_BITS[info.dtype]
        count = scale.shape[-1]
        widths = [-(-count * size * bits // word) for bits, size in declared]
        if info.shape[-1] not in widths or scale.shape[:-1] != info.shape[:-1]:
            shown = " or ".join(f"{bits} bits in groups of {size}" for bits, size in declared)
            raise CompressionError(
                f"tensor {name!r} has shape {list(info.shape)} and its scales "
                f"{list(scale.shape)}, which do not fit the {shown} that config.json declares; "
                "restore them from their source"
            )


class PartialModel:
    """The stock model on meta, whose parts are filled from the checkpoint and emptied again.

    If `resident`, it keeps loaded tensors on the device and fills parts from there the next time.
    Loaded tensors are never written to: they may be mapped files of the checkpoint."""

    resident = False

    def __init__(
        self, checkpoint: Checkpoint, config: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.dtype = dtype
        self.device = device
        self.model = build_meta(config, dtype)
        self.quantizer = dequantizer(config)
        self.empty = {key: value.detach() for key, value in self.model.state_dict().items()}
        try:
            self.plain_conversions = self.conversions = get_model_conversion_mapping(
                self.model, None, self.quantizer
            )
        except ValueError as error:  # of weights that are split, as those of a fused attention
            kind = type(self.model).__name__
            raise CompressionError(
                f"quantised weights of {kind} can't be read: {reason_of(error)}"
            ) from error
        self.plain_keys = self.keys = map_keys(checkpoint.tensors, self.model, self.conversions)
        tied = self.model.all_tied_weights_keys

        def alike(first: str, second: str) -> bool:
            pairs = zip(self.keys.sources[first], self.keys.sources[second], strict=False)
            return all(checkpoint.holds_alike(*pair) for pair in pairs)

        self.tied = tied_weights(self.model, self.keys.sources.keys(), alike)
        self.ties_nothing = bool(tied) and not self.tied  # though the config says so
        self.model.all_tied_weights_keys = self.tied
        self._refuse_foreign_names()
        if self.quantizer is not None:
            refuse_misfits(checkpoint)
            singles = single_experts(self.model, self.keys.unknown)
            if singles:
                plain = [*get_model_conversion_mapping(self.model), *singles]
                self.conversions = self.quantizer.update_weight_conversions(plain, self.model)
                self.keys = map_keys(checkpoint.tensors, self.model, self.conversions)
            refuse_unread_scales({name: self.keys.targets.get(name) for name in checkpoint.tensors})
            self.plain_conversions = [*get_model_conversion_mapping(self.model), *singles]
            self.plain_keys = map_keys(checkpoint.tensors, self.model, self.plain_conversions)
        floating = {key for key, value in self.empty.items() if value.is_floating_point()}
        refuse_unscaled(checkpoint.tensors, self.plain_keys.targets, self.keys.targets, floating)
        # names of scales of one for experts' weights that have none, beside experts that do: the
        # loader takes the scales of a layer in their order, so each weight needs one
        self._unit_scales = dict[str, str]()
        stored = {
            (target, self.keys.patterns[name], name.rpartition(".")[0])
            for name, target in self.keys.targets.items()
        }
        scaled = {(target, pattern) for target, pattern, _ in stored}
        for target, pattern, module in sorted(stored, key=str):
            for suffix in ("_scale", "_scale_inv"):
                scale = f"{pattern}{suffix}"
                if (target, scale) in scaled and (target, scale, module) not in stored:
                    self._unit_scales[f"{module}.weight"] = f"{module}.weight{suffix}"
        self._loaded = set[str]()
        # of loaded tensors, so that whoever writes them need not read them again
        self._views = dict[str, Tensor]()
        self.kept = dict[str, Tensor]()
        self.ahead = ReadAhead(checkpoint, device)
        self._fill_constant_buffers()

    def _refuse_foreign_names(self) -> None:
        """Refuse a checkpoint written by another tool under its own names, or without values."""
        folder = self.checkpoint.folder
        stored = self.checkpoint.tensors
        targets = self.keys.targets
        kind = type(self.model).__name__
        empty = [stored[name] for name in targets if not stored[name].nbytes]
        if empty:
            raise CompressionError(
                f"{folder} holds {len(empty)} tensors without a value, such as {empty[0].name!r} "
                f"of shape {list(empty[0].shape)}, as a trainer writes what is sharded over "
                "processes (DeepSpeed's ZeRO-3, FSDP); gather the weights there and save the model "
                "again"
            )
        mlx = next((name for name in stored if MLX in name), None)
        if mlx:
            raise CompressionError(
                f"{folder} has MLX's {mlx!r}; name the checkpoint that it was made of"
            )
        missing = self.empty.keys() - {*targets.values(), *self.tied}
        if not missing:
            return
        # possible names in the stock model, each with a stored one and the tools that wrapped it
        names: dict[str, tuple[str, str]] = {}
        for name in self.keys.unknown[:: 1 + len(self.keys.unknown) // SAMPLES]:
            inner = f".{name}"
            for wrapper in WRAPPERS:
                inner = inner.replace(f".{wrapper}.", ".")
            tools = [tool for wrapper, tool in WRAPPERS.items() if f".{wrapper}." in f".{name}"]
            names.setdefault(inner[1:], (name, " and ".join(dict.fromkeys(tools))))
            parts = name.split(".")
            for width, begin in product((1, 2), range(len(parts) - 1)):
                if not any(map(str.isdecimal, parts[begin : begin + width])):
                    rest = ".".join(parts[:begin] + parts[begin + width :])
                    names.setdefault(rest, (name, "another tool"))
        stock = map_keys(names, self.model, self.conversions).targets
        for inner, (name, tool) in names.items():
            if stock.get(inner) in missing:
                raise CompressionError(
                    f"{folder} has {name!r} where {kind} has {inner!r}, as {tool} would name it; "
                    "save the model inside with save_pretrained (for peft after merge_and_unload)"
                )
        if not targets:
            raise CompressionError(
                f"no tensor of {folder} fills {kind}, for it has {next(iter(stored), None)!r} "
                f"where the model has {min(missing)!r}; name a checkpoint as transformers writes it"
            )

    @property
    def missing(self) -> list[str]:
        """State-dict entries that no stored tensor fills."""
        filled = {*self.keys.targets.values(), *self.tied}
        also_made = {target for entry in self.conversions for target in entry.target_patterns[1:]}
        missing = []
        for key in self.empty.keys() - filled:
            if not any(target in key for target in also_made):
                missing.append(key)
        for key, names in self.plain_keys.sources.items():
            there = {self.plain_keys.patterns[name] for name in names}
            converter = self.converter_of(self.plain_keys.patterns[names[0]])
            for source in getattr(converter, "source_patterns", ()):
                # Only quantised weights have scales and largest values.
                if source not in there and not re.search("scale|amax", source):
                    missing.append(f"{key} (of {source})")
        return sorted(missing)

    def computing_in(self, dtype: torch.dtype, device: torch.device) -> "PartialModel":
        """Return the same model, empty, in another dtype or on another device; itself if nothing
        changes."""
        alike = (self.dtype, self.device) == (dtype, device)
        return self if alike else PartialModel(self.checkpoint, self.config, dtype, device)

    def _fill_constant_buffers(self) -> None:
        """Compute the buffers that no checkpoint holds (rotary frequencies), as the stock loader
        does."""
        modules = dict(self.model.named_modules())
        owners = [name for name, module in modules.items() if isinstance(module, PreTrainedModel)]
        with torch.no_grad(), guard_torch_init_functions():
            for name, module in modules.items():
                buffers = module._buffers
                names = module._non_persistent_buffers_set
                names = [key for key in names if buffers.get(key) is not None]
                for key in names:
                    buffers[key] = torch.empty_like(buffers[key], device="cpu")
                if names:
                    modules[decoder_layer_of(f"{name}.", owners)]._init_weights(module)
                for key in names:
                    buffers[key] = buffers[key].to(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the dtype for computing."""
        return sum(value.nbytes for key, value in self.empty.items() if key not in self.tied)

    @property
    def unread(self) -> int:
        """Bytes that a resident model has yet to load and keep."""
        if not self.resident:
            return 0
        return self.nbytes - sum(value.nbytes for value in self.kept.values())

    def stream(self) -> None:
        """Stop being resident, to free memory."""
        self.resident = False
        self.kept = {}

    def converter_of(self, pattern: str | None) -> Any:
        """Return the conversion of stored tensors whose names match the pattern; None if there is
        none."""
        for entry in self.plain_conversions:
            if isinstance(entry, WeightConverter) and pattern in entry.source_patterns:
                return entry
        return None

    def keys_under(self, module_name: str) -> list[str]:
        """Return the state-dict keys inside a module."""
        prefix = f"{module_name}." if module_name else ""
        return [key for key in self.empty if key.startswith(prefix)]

    def is_mapped(self, value: Tensor) -> bool:
        """Return True if a loaded tensor is a view of a file, which nothing may be written to."""
        return value.untyped_storage().data_ptr() in {
            view.data_ptr() for view in self._views.values()
        }

    def load(self, keys: Iterable[str]) -> None:
        """Fill these state-dict entries; raises `CompressionError` for NaN, a missing tensor or a
        wrong shape."""
        wanted = [key for key in keys if key not in self._loaded]
        if not wanted:
            return
        for key in {self.tied.get(key, key) for key in wanted} & self.kept.keys():
            set_tensor(self.model, key, self.kept[key])
        names = self._names_of(wanted)
        if names:
            tensors = self.ahead.take(names)
            self._views |= self.checkpoint.read_all(names)
            targets = self.keys.targets
            plan = self.model._get_dtype_plan(self.dtype)
            more = {"dtype": self.dtype, "dtype_plan": plan, "hf_quantizer": self.quantizer}
            # first the largest alone: while it is converted, no other tensor needs to be in memory
            sizes = {targets[name]: self.empty[targets[name]].numel() for name in names}
            largest = max(sizes, key=sizes.__getitem__)
            for alone in (True, False):
                chosen = [name for name in names if (targets[name] == largest) is alone]
                stored = {name: tensors.pop(name) for name in chosen}
                for name in sorted(stored.keys() & self._unit_scales.keys()):
                    stored[self._unit_scales[name]] = torch.ones(1, 1, device=stored[name].device)
                report = load_converted(self.model, stored, self.device, self.conversions, **more)
                for name, message in sorted(report.conversion_errors.items()):
                    lines = [line for line in message.splitlines() if not line.startswith("Error:")]
                    said = [line.strip() for line in lines if line.strip()]
                    raise CompressionError(f"Tensor {name} can't be converted: {said[-1]}")
                for name, found, expected in sorted(report.mismatched_keys):
                    raise CompressionError(
                        f"Tensor {name} has shape {list(found)}, the model wants {list(expected)}."
                    )
                stored.clear()
                give_back()
        self._settle(wanted)

    def _settle(self, wanted: list[str]) -> None:
        """Share tied tensors, and check that everything requested has been loaded."""
        for key in wanted:
            source = self.tied.get(key, key)
            tensor = self.model.get_parameter_or_buffer(source)
            if tensor.is_meta:
                raise CompressionError(
                    f"tensor {source!r} is missing from the checkpoint {self.checkpoint.folder}; "
                    "download it again"
                )
            tensor.requires_grad_(False)  # gradients are only for tensors that ask for them
            if key != source:
                set_tensor(self.model, key, tensor)
            self._loaded |= {key, source}
            if self.resident:
                self.kept[source] = tensor.detach()  # the parameter itself may get a gradient

    def read_ahead(self, keys: Iterable[str]) -> None:
        """Have a thread read the tensors that `load` of these entries will need, while this one
        computes."""
        self.ahead.begin(self._names_of(key for key in keys if key not in self._loaded))

    def _names_of(self, keys: Iterable[str]) -> list[str]:
        """Return the stored tensors of entries that are not kept.

        Those of a one-to-many conversion are filed under its first target.
        """
        sources = {self.tied.get(key, key) for key in keys} - self.kept.keys()
        direct = sources & self.keys.sources.keys()
        parents = tuple(f"{key.rpartition('.')[0].rpartition('.')[0]}." for key in sources - direct)
        targets = direct | {
            key for key in self.keys.sources if key.startswith(parents) and key not in self._loaded
        }
        return [name for target in targets for name in self.keys.sources[target]]

    def release(self, module_name: str) -> None:
        """Empty a module; with "" the whole model, and stop reading ahead."""
        if not module_name:
            self.ahead.stop()
        for key in self.keys_under(module_name):
            for name in self.keys.sources.get(key, ()):
                self._views.pop(name, None)
            if key in self._loaded:
                for entry in {key, self.tied.get(key, key)}:
                    set_tensor(self.model, entry, self.empty[entry])
                    self._loaded.discard(entry)
