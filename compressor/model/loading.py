"""Loading parts of a checkpoint into the stock model on meta, through transformers' own weight conversion.

A thread reads the next layer's stored tensors while this layer computes (`ReadAhead`).
"""

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.checkpoint.quantized import dequantizer, refuse_faults, refuse_unread_scales
from compressor.checkpoint.reader import Checkpoint, refuse_nan
from compressor.errors import CompressionError
from compressor.memory import available
from compressor.model.architecture import build_stored
from compressor.progress import quiet_transformers

STAGE = 2**25  # bytes of each of the two pinned buffers
SHARE = 2  # how many times what is read ahead must be free


class Cuda:
    """What copying asks of a CUDA device, each call at the place where the order of streams is decided."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def room(self) -> int:
        """Bytes of the device that can still be allocated."""
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0]) + held

    def copying(self) -> AbstractContextManager[Any]:
        """Makes the copying stream this thread's own."""
        return torch.cuda.stream(self.stream)

    def pinned(self, size: int) -> Tensor:
        """Page-locked bytes of the host."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def empty(self, like: Tensor) -> Tensor:
        """An uninitialised tensor of the device, from the memory of this thread's stream."""
        return torch.empty(like.shape, dtype=like.dtype, device=self.device)

    def copy(self, target: Tensor, staged: Tensor) -> None:
        """Begin to copy pinned bytes to the device."""
        target.copy_(staged, non_blocking=True)

    def mark(self) -> Any:
        """An event behind all that this thread's stream has been given so far."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def hand_over(self, done: Any, tensors: Iterable[Tensor]) -> None:
        """Let this thread's stream use tensors once `done` has come; freed, they stay its own until it is through."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(stream)


class Staging:
    """Copies tensors to the device by way of two pinned buffers: one is filled while the other is copied from."""

    def __init__(self, cuda: Any, size: int = STAGE) -> None:
        self.cuda, self.size = cuda, size
        self.buffers = [cuda.pinned(size) for _ in range(2)]
        self.copied: list[Any] = [None, None]  # behind the last copy out of each
        self.turn = self.used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, once the copying stream has come so far."""
        target: Tensor = self.cuda.empty(tensor)
        if tensor.numel():
            source, sink = (value.reshape(-1).view(torch.uint8) for value in (tensor, target))
            begin = 0
            while begin < len(source):
                if self.used == self.size:  # go on with the other buffer, once nothing is copied from it any more
                    self.copied[self.turn] = self.cuda.mark()
                    self.turn, self.used = 1 - self.turn, 0
                    if self.copied[self.turn] is not None:
                        self.copied[self.turn].synchronize()
                end = min(len(source), begin + self.size - self.used)
                staged = self.buffers[self.turn][self.used : self.used + end - begin]
                staged.copy_(source[begin:end])
                self.cuda.copy(sink[begin:end], staged)
                self.used, begin = self.used + end - begin, end
        return target


class ReadAhead:
    """Reads a checkpoint's tensors, those that were announced ahead of time; each is checked for NaN once."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, cuda: Any = None) -> None:
        self.checkpoint, self.device, self.cuda = checkpoint, device, cuda
        self.checked = set[str]()
        self.staging: Staging | None = None
        self._work: _Work | None = None

    def begin(self, names: Iterable[str]) -> None:
        """Have a thread read these tensors, where that is worth it; what was announced before is forgotten.

        It is not where room is short, or where they are to stay views of files that the page cache holds already.
        """
        self.stop()
        wanted, staging = list(names), self.stage()
        if not wanted or (staging is None and self.checkpoint.cached(wanted)):
            return
        size = sum(self.checkpoint.tensors[name].nbytes for name in wanted)
        rooms = (available(), None if staging is None else self.cuda.room())
        if all(room is None or room >= SHARE * size for room in rooms):
            self._work = _Work(self, wanted)

    def take(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names, as views of files or on the device; raises `CompressionError` for NaN.

        What was read ahead is waited for and given away; the rest is read now.
        """
        wanted, found = list(names), dict[str, Tensor]()
        if self._work is not None and not self._work.names.isdisjoint(wanted):
            found = self._work.take(wanted)
        read = self.checkpoint.read_all([name for name in wanted if name not in found])
        self.check(read)
        return found | read

    def stop(self) -> None:
        """End the thread, if there is one, and forget what it has read."""
        if self._work is not None:
            self._work.end()
            self._work = None

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `CompressionError` naming a tensor that holds a NaN."""
        for name, tensor in tensors.items():
            if name not in self.checked:
                refuse_nan(name, self.checkpoint.tensors[name].file, tensor)
                self.checked.add(name)

    def stage(self) -> Staging | None:
        """The way to a CUDA device; None where tensors stay views of their files."""
        if self.staging is None and (self.cuda is not None or self.device.type == "cuda"):
            self.cuda = self.cuda or Cuda(self.device)
            self.staging = Staging(self.cuda)
        return self.staging


class _Work:
    """One layer's tensors, read by a thread that ends by itself when it has read them."""

    def __init__(self, reader: ReadAhead, names: list[str]) -> None:
        self.reader, self.names = reader, set(names)
        self.staging = reader.stage()
        self.found: dict[str, Tensor] = {}
        self.fault: BaseException | None = None
        self.begun: Any = None if self.staging is None else self.staging.cuda.mark()  # all that has been computed
        self.done: Any = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(names,), name="reading ahead")
        self.thread.start()

    def take(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Wait for the thread and give those of the names away that it has read; raises what it met."""
        self.thread.join()
        if self.fault is not None:
            raise self.fault
        taken = {name: self.found.pop(name) for name in names if name in self.found}
        if self.staging is not None and taken:
            self.staging.cuda.hand_over(self.done, taken.values())
        return taken

    def end(self) -> None:
        """End the thread; its faults are nobody's any more."""
        self.ended.set()
        self.thread.join()
        self.found.clear()

    def _run(self, names: list[str]) -> None:
        staging, reader = self.staging, self.reader
        try:
            with nullcontext() if staging is None else staging.cuda.copying():
                if staging is not None:
                    self.begun.synchronize()  # the device has done what it was given, and so freed that room
                for name, tensor in reader.checkpoint.read_all(names).items():
                    if self.ended.is_set():
                        return
                    if staging is None:
                        reader.checked.discard(name)  # to check it is what brings every page in
                    reader.check({name: tensor})
                    self.found[name] = tensor if staging is None else staging.copy(tensor)
                if staging is not None:
                    self.done = staging.cuda.mark()
        except torch.OutOfMemoryError:
            self.found = {}  # `take` reads what is missing when its place has become free
        except BaseException as error:
            self.fault = error


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
        self.model = build_stored(checkpoint, config, dtype)
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
        names = self._names_of(wanted)
        tensors = self.ahead.take(names)
        # the largest first and by itself: while it is put together, nothing else need be in memory
        targets = {self.keys.targets[name] for name in names}
        largest = max(targets, key=lambda target: self.empty[target].numel(), default=None)
        for alone in (True, False):
            stored = {name: tensors.pop(name) for name in names if (self.keys.targets[name] == largest) is alone}
            plan = self.model._get_dtype_plan(self.dtype)
            more = {"dtype": self.dtype, "dtype_plan": plan, "hf_quantizer": self.quantizer}
            refuse_faults(load_converted(self.model, stored, self.device, self.conversions, **more))
        self._settle(wanted)

    def _settle(self, wanted: list[str]) -> None:
        """Share tied tensors and check that everything asked for has arrived."""
        state = self.model.state_dict()
        for key in wanted:
            source = self.tied.get(key, key)
            if state[source].device.type == "meta":
                raise CompressionError(
                    f"tensor {source!r} is missing from the checkpoint {self.checkpoint.folder}; download it again"
                )
            tensor = getattr(*parent_and_name(self.model, source))
            tensor.requires_grad_(False)  # only what is asked for has gradients
            if key != source:
                set_tensor(self.model, key, tensor)
            self._loaded |= {key, source}

    def read_ahead(self, keys: Iterable[str]) -> None:
        """Have a thread read what `load` of these entries will need, while this one computes."""
        self.ahead.begin(self._names_of(key for key in keys if key not in self._loaded))

    def _names_of(self, keys: Iterable[str]) -> list[str]:
        """Stored tensors of state-dict entries; those of a one-to-many conversion are filed under its first target."""
        sources = {self.tied.get(key, key) for key in keys}
        direct = sources & self._sources.keys()
        parents = tuple(f"{key.rpartition('.')[0].rpartition('.')[0]}." for key in sources - direct)
        targets = direct | {key for key in self._sources if key.startswith(parents) and key not in self._loaded}
        return [name for target in targets for name in self._sources[target]]

    def release(self, module_name: str) -> None:
        """Send a module's tensors back to meta; with "" all of them, and nothing is read ahead any more."""
        if not module_name:
            self.ahead.stop()
        for key in self.keys_under(module_name):
            if key in self._loaded:
                for entry in {key, self.tied.get(key, key)}:
                    set_tensor(self.model, entry, self.empty[entry])
                    self._loaded.discard(entry)
