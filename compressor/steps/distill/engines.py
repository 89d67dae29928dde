"""Training the float32 masters of a model's layers: with the whole model in memory, or one decoder
layer at a time.

A tensor trained whole has one master. One that LoRA trains (Hu et al., arXiv:2106.09685) has two,
its factors, and stays what it was itself: W = W0 + (alpha / r) B A, with alpha = 2 r. W is [..., M,
N], A [..., r, N], B [..., M, r]; a fused tensor of experts has its own factors for each of them.
The gradient of a weight is in memory anyway while its layer is trained, so the factors' gradients
follow by the chain rule.

Layer by layer, a step is a reverse pass, and a layer's state waits on disk. Its update is made
while it is loaded on the way back. No layer below has been replayed by then, and none above is used
again, so that the step is that of the whole model. Gradients are clipped to a norm of 1 for each
decoder layer: that way never sees the norm of all."""

import hashlib
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor, nn

from compressor.checkpoint.reader import TORCH_DTYPES
from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.divergence.evaluator import Evaluator, Figures
from compressor.errors import CompressionError
from compressor.model.experts import parameter_names
from compressor.model.inputs import forward_inputs
from compressor.model.loading import saved_names, set_tensor
from compressor.model.moe_layer import layers_by_decoder_layer
from compressor.model.opened import OpenModel
from compressor.model.streaming import ReversePass, ReverseVisitor
from compressor.steps.distill.objective import NotFiniteError, Objective
from compressor.steps.distill.options import Distill
from compressor.steps.tensors import refuse_overflow
from compressor.tensor_cache import load_tensors, save_tensors

MOST_NORM = 1.0  # of a decoder layer's gradients
MOMENTS = "of "  # begins the name of a tensor of the optimiser's state in a file

Tensors = Mapping[str, Tensor]
Moments = dict[str, dict[str, Tensor]]  # the optimiser's state by master
Masters = dict[str, Tensor]  # by name: a state-dict key, or one of a key's factors
SCALE = 2.0  # LoRA's alpha / r


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """State-dict keys of what is trained of the decoder layer `decoder_layer`: `whole`, or through
    LoRA's factors."""

    decoder_layer: str
    whole: tuple[str, ...]
    factored: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.whole, *self.factored)

    def begin(self, stored: Tensors, rank: int, seed: int) -> Masters:
        """Masters that leave the layer's `stored` tensors as they are."""
        masters = {key: stored[key].detach().to(torch.float32, copy=True) for key in self.whole}
        for key in self.factored:
            # a factor is independent of the others
            digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
            factors = begin_factors(tuple(stored[key].shape), rank, generator)
            for name, factor in zip(_names(key), factors, strict=True):
                masters[name] = factor.to(stored[key].device)
        return masters

    def values(self, stored: Tensors, masters: Tensors) -> Tensors:
        """Return the layer's tensors in float32 that these masters stand for.

        `stored` are those that it was read with.
        """
        values = {key: masters[key] for key in self.whole}
        for key in self.factored:
            first, second = _names(key)
            values[key] = merged(stored[key], masters[first], masters[second])
        return values

    def gradients(self, model: nn.Module, masters: Tensors) -> Tensors:
        """Return the masters' gradients, from those of the layer's tensors in the live `model`."""
        gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
        for key in self.keys:
            gradient = model.get_parameter(key).grad
            if gradient is None:
                continue
            wide = gradient.detach().float()
            if key in self.whole:
                gradients[key] = wide
            # dL/dA = (alpha / r) B^T dL/dW, [..., r, N], and dL/dB = (alpha / r) dL/dW A^T, [...,
            # M, r]
            else:
                first, second = _names(key)
                gradients[first] = SCALE * (masters[second].mT @ wide)
                gradients[second] = SCALE * (wide @ masters[first].mT)
        return gradients


def _names(key: str) -> tuple[str, str]:
    return f"{key}.lora_A", f"{key}.lora_B"


def trained_layers(model: OpenModel, options: Distill) -> tuple[TrainedLayer, ...]:
    """List the trained tensors in the order of the decoder layers; layers without any are left out.

    `experts`: the experts' tensors and the routers' parameters; `router`: those of the routers
    alone; `lora`: factors of every linear layer and of the experts' matrices, and the routers'
    parameters whole; `all`: every floating-point parameter. What lies outside the decoder layers
    (embeddings, head, the last norm) is never trained. Raises `CompressionError` for a tensor that
    another layer shares."""
    live = model.partial.model
    by_decoder_layer = layers_by_decoder_layer(model.architecture.layers)
    parameters = {key for key, value in live.named_parameters() if value.is_floating_point()}
    linear = {
        f"{name}.weight" for name, module in live.named_modules() if isinstance(module, nn.Linear)
    }
    shared = {*model.partial.tied, *model.partial.tied.values()}
    trained = []
    for decoder_layer in model.architecture.decoder_layers:
        keys = [key for key in model.partial.keys_under(decoder_layer) if key in parameters]
        layers = by_decoder_layer.get(decoder_layer, [])
        experts = tuple(f"{layer.name}." for layer in layers)
        routers = tuple(f"{layer.router}." for layer in layers)
        in_experts = [key for key in keys if key.startswith(experts)]
        in_routers = [key for key in keys if key.startswith(routers)]
        whole = in_routers
        factored = []
        if options.train == "all":
            whole = keys
        elif options.train == "experts":
            whole = [*in_experts, *in_routers]
        elif options.train == "lora":
            matrices = linear - {*in_experts, *in_routers}
            for layer in layers:
                parts = parameter_names(live.get_submodule(layer.name))[:2]
                matrices |= {f"{layer.name}.{part}" for part in parts}
            factored = [key for key in keys if key in matrices]
        for key in (*whole, *factored):
            if key in shared:
                raise CompressionError(
                    f"{key} is shared by two layers, so it cannot be trained as one of them"
                )
        if whole or factored:
            trained.append(TrainedLayer(decoder_layer, tuple(whole), tuple(factored)))
    return tuple(trained)


def begin_factors(
    shape: tuple[int, ...], rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A and B of a weight of this shape in float32: A uniform in ±1 / sqrt(N), B zero, so that W is
    W0 at first."""
    *experts, rows, columns = shape
    first = torch.rand(*experts, rank, columns, generator=generator) * 2 - 1
    return first / math.sqrt(columns), torch.zeros(*experts, rows, rank)


def merged(weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """W in float32, of W0, A and B."""
    return torch.baddbmm(
        weight.float().reshape(-1, *weight.shape[-2:]),
        second.reshape(-1, *second.shape[-2:]),
        first.reshape(-1, *first.shape[-2:]),
        alpha=SCALE,
    ).view(weight.shape)


def stored_dtypes(model: OpenModel, layers: Sequence[TrainedLayer]) -> dict[str, torch.dtype]:
    """Return the dtype in which each trained tensor is stored, by state-dict key.

    Refuses one that cannot be written back.
    """
    dtypes = {}
    for layer in layers:
        empty = {key: model.partial.empty[key] for key in layer.keys}
        direct, converted = _stored(model, empty)
        for key, name in direct.items():
            dtypes[key] = _plain_dtype(model, key, name, empty[key])
        others = [key for key in layer.keys if key not in direct]
        kinds = {_plain_dtype(model, others[0], name, value) for name, value in converted}
        if kinds:
            dtypes |= dict.fromkeys(others, reduce(torch.promote_types, kinds))
    return dtypes


def stored_tensors(model: OpenModel, values: Tensors, dtypes: Mapping[str, torch.dtype]) -> Tensors:
    """Return a decoder layer's trained tensors by the names and in the dtypes of the checkpoint."""
    rounded = {key: refuse_overflow(key, value.to(dtypes[key])) for key, value in values.items()}
    direct, converted = _stored(model, rounded)
    tensors = {name: rounded[key] for key, name in direct.items()}
    for name, value in converted:  # experts may be stored in several dtypes
        dtype = TORCH_DTYPES[model.checkpoint.tensors[name].dtype]
        tensors[name] = refuse_overflow(name, value.to(dtype).contiguous())
    return tensors


def _stored(model: OpenModel, tensors: Tensors) -> tuple[dict[str, str], list[tuple[str, Tensor]]]:
    """The stored name of each tensor that is stored as the model has it, and all that the others
    are stored as."""
    keys = model.partial.keys
    direct = {
        key: name
        for name, key in keys.targets.items()
        if key in tensors and keys.patterns[name] is None
    }
    others = {key: value for key, value in tensors.items() if key not in direct}
    if not others:
        return direct, []
    try:
        return direct, list(saved_names(model.partial.model, others))
    except Exception as error:  # conversions raise any exception
        raise _unknown_storage(next(iter(others))) from error


def _plain_dtype(model: OpenModel, key: str, name: str, value: Tensor) -> torch.dtype:
    info = model.checkpoint.tensors.get(name)
    if info is not None and info.is_plain and info.shape == tuple(value.shape):
        return TORCH_DTYPES[info.dtype]
    if model.layout.quantized:
        raise CompressionError(
            f"tensor {name!r} is stored quantised, so nothing can be trained into it; distill the "
            "model before it is "
            "quantised, or train what is not, as the option train: router does"
        )
    raise _unknown_storage(key)


def _unknown_storage(key: str) -> CompressionError:
    return CompressionError(
        f"{key} is not stored as transformers would write it, so it cannot be written back; load "
        "the checkpoint with "
        "transformers and save it anew"
    )


@dataclass(slots=True)
class LayerState:
    """A decoder layer's masters, and the optimiser's state of each."""

    masters: Masters
    moments: Moments = field(default_factory=dict)


def update(state: LayerState, gradients: Tensors, optimizer: str, rate: float) -> None:
    """Clip the gradients and take a step, in place. Raises `NotFiniteError` for gradients that are
    no numbers.

    Adafactor (Shazeer and Stern 2018) keeps a row and a column of a matrix's second moments. Its
    steps are as long as Adam's at the same rate: root mean square `rate`, not relative to a
    tensor's size."""
    norm = math.sqrt(sum(float(as_float64(value).square().sum()) for value in gradients.values()))
    if not math.isfinite(norm):
        raise NotFiniteError
    scale = min(1.0, MOST_NORM / norm) if norm else 1.0
    masters = list(state.masters.values())
    stepping: torch.optim.Optimizer
    if optimizer == "adam":
        stepping = torch.optim.Adam(masters, lr=rate)
    else:  # a floor of 1 under a tensor's size: rate as is
        stepping = torch.optim.Adafactor(masters, lr=rate, eps=(None, 1.0))
    for name, master in state.masters.items():
        master.grad = gradients[name] * scale
        if name in state.moments:
            stepping.state[master] = state.moments[name]
    stepping.step()
    for name, master in state.masters.items():
        state.moments[name] = dict(stepping.state[master])
        master.grad = None


def file_of(folder: Path, decoder_layer: str) -> Path:
    return folder / f"{decoder_layer}.safetensors"


def keep_state(folder: Path, decoder_layer: str, state: LayerState) -> None:
    tensors = dict(state.masters)
    for name, moments in state.moments.items():
        tensors |= {f"{MOMENTS}{name} {kind}": value for kind, value in moments.items()}
    save_tensors(file_of(folder, decoder_layer), tensors, {"decoder_layer": decoder_layer})


def kept_state(
    folder: Path, decoder_layer: str, device: torch.device, moments: bool = True
) -> LayerState:
    """Return a layer's state as `keep_state` has written it, in tensors of its own; perhaps the
    masters alone."""
    state = LayerState({})
    for name, value in load_tensors(file_of(folder, decoder_layer)).items():
        if not name.startswith(MOMENTS):
            state.masters[name] = value.to(device, copy=True)
        elif moments:
            key, _, kind = name.removeprefix(MOMENTS).rpartition(" ")
            moment = value.clone() if kind == "step" else value.to(device, copy=True)
            state.moments.setdefault(key, {})[kind] = moment
    return state


class _Engine:
    """Base of both engines: the handling of a loaded layer."""

    def __init__(self, model: OpenModel, options: Distill, seed: int) -> None:
        layers = trained_layers(model, options)
        self.model = model
        self.options = options
        self.seed = seed
        # by decoder layer
        self.layers: Mapping[str, TrainedLayer] = {layer.decoder_layer: layer for layer in layers}
        self.stored = stored_dtypes(model, layers)

    def loaded(self, layer: TrainedLayer) -> Tensors:
        return {key: self.model.partial.model.get_parameter(key).detach() for key in layer.keys}

    def put(self, layer: TrainedLayer, stored: Tensors, masters: Tensors, train: bool) -> None:
        """Put a layer's masters into the loaded layer: with gradients, or rounded as they would be
        stored."""
        partial = self.model.partial
        for key, value in layer.values(stored, masters).items():
            if not train:
                value = value.to(self.stored[key]).float()
            # what is loaded may be the checkpoint's own file, mapped: it is replaced, never written
            computed = value.detach().to(partial.device, partial.empty[key].dtype)
            set_tensor(partial.model, key, nn.Parameter(computed, requires_grad=train))

    def values(self, folder: Path, decoder_layer: str) -> Tensors:
        """Return a layer's trained tensors in float32 in a kept state, by state-dict key.

        The layer itself is read anew.
        """
        partial = self.model.partial
        layer = self.layers[decoder_layer]
        partial.release(decoder_layer)
        partial.load(layer.keys)
        masters = kept_state(folder, decoder_layer, partial.device, moments=False).masters
        values = layer.values(self.loaded(layer), masters)
        partial.release(decoder_layer)
        return values


class InMemory(_Engine):
    """A model in training, whole, with the state of all its layers."""

    def __init__(self, model: OpenModel, options: Distill, seed: int) -> None:
        super().__init__(model, options, seed)
        model.partial.load(model.partial.keys_under(""))
        self.read = dict[str, Tensor]()
        for layer in self.layers.values():
            self.read |= self.loaded(layer)
        self.states = {
            decoder_layer: LayerState(layer.begin(self.read, options.rank, seed))
            for decoder_layer, layer in self.layers.items()
        }

    def step(self, objective: Objective, rate: float) -> None:
        """Take one step on the objective's batches. Raises `NotFiniteError` where a loss or a
        gradient is no number."""
        for decoder_layer, layer in self.layers.items():
            self.put(layer, self.read, self.states[decoder_layer].masters, train=True)
        failed = 0.0
        try:
            self._backward(objective)
        except NotFiniteError:
            failed = 1.0
        sums = torch.tensor([failed, *objective.parts.values()], dtype=torch.float64)
        failures, *parts = ranks().all_reduce(sums).tolist()
        objective.parts = dict(zip(objective.parts, parts, strict=True))
        if failures:  # at one rank, so at all
            raise NotFiniteError
        for decoder_layer, layer in self.layers.items():
            state = self.states[decoder_layer]
            gradients = layer.gradients(self.model.partial.model, state.masters)
            gradients = {name: ranks().all_reduce(value) for name, value in gradients.items()}
            update(state, gradients, self.options.optimiser, rate)

    def _backward(self, objective: Objective) -> None:
        """Take the gradients of all batches' losses, the layers' forwards as the objective has
        them."""
        partial = self.model.partial
        modules = {
            decoder_layer: partial.model.get_submodule(decoder_layer)
            for decoder_layer in self.model.architecture.decoder_layers
        }
        try:
            for decoder_layer, module in modules.items():
                module.forward = objective.wrap_forward(decoder_layer, module.forward)
            with torch.enable_grad():
                for number, batch in enumerate(objective.batches):
                    if len(batch.tokens):
                        objective.on_batch_start(number)
                        inputs = forward_inputs(batch.tokens, partial.device, partial.dtype)
                        objective.loss(number, partial.model(**inputs, use_cache=False)).backward()
        finally:
            for module in modules.values():
                module.__dict__.pop("forward", None)

    @torch.no_grad()
    def evaluated(self, evaluator: Evaluator) -> Figures:
        """Return the figures of the model as it would be stored now."""
        for decoder_layer, layer in self.layers.items():
            self.put(layer, self.read, self.states[decoder_layer].masters, train=False)
        return evaluator.measure_loaded(self.model.partial.model)

    def save(self, folder: Path) -> None:
        for decoder_layer, state in self.states.items():
            keep_state(folder, decoder_layer, state)

    def load(self, folder: Path) -> None:
        self.states = {
            decoder_layer: kept_state(folder, decoder_layer, self.model.partial.device)
            for decoder_layer in self.layers
        }


class Streamed(_Engine):
    """The same with one layer loaded at a time; the present state of all layers is in the folder
    `now`."""

    def __init__(self, model: OpenModel, options: Distill, seed: int, now: Path) -> None:
        super().__init__(model, options, seed)
        self.now = now
        shutil.rmtree(now, ignore_errors=True)
        for decoder_layer, layer in self.layers.items():
            model.partial.load(layer.keys)
            keep_state(
                now, decoder_layer, LayerState(layer.begin(self.loaded(layer), options.rank, seed))
            )
            model.partial.release(decoder_layer)

    def step(self, objective: Objective, rate: float) -> None:
        run = ReversePass(self.model, [batch.tokens for batch in objective.batches])
        run.run(objective.loss, _Masters(self, rate), objective)

    @torch.no_grad()
    def evaluated(self, evaluator: Evaluator) -> Figures:
        return evaluator.measure(self.model, visitors=[_Masters(self)])[0]

    def save(self, folder: Path) -> None:
        _linked(self.now, folder, self.layers)

    def load(self, folder: Path) -> None:
        _linked(folder, self.now, self.layers)


Engine = InMemory | Streamed


class _Masters(ReverseVisitor):
    """Layers compute with their masters in `now`: rounded as stored, or trained and updated on the
    way back."""

    def __init__(self, engine: Streamed, rate: float | None = None) -> None:
        self.engine = engine
        self.rate = rate

    def on_layer_loaded(self, decoder_layer: str) -> None:
        engine = self.engine
        layer = engine.layers.get(decoder_layer)
        if layer is not None:
            masters = kept_state(
                engine.now, decoder_layer, engine.model.partial.device, moments=False
            ).masters
            engine.put(layer, engine.loaded(layer), masters, train=self.rate is not None)

    def on_reverse_end(self, decoder_layer: str) -> None:
        engine = self.engine
        layer = engine.layers.get(decoder_layer)
        if self.rate is not None and layer is not None:
            state = kept_state(engine.now, decoder_layer, engine.model.partial.device)
            gradients = layer.gradients(engine.model.partial.model, state.masters)
            update(state, gradients, engine.options.optimiser, self.rate)
            keep_state(engine.now, decoder_layer, state)


def _linked(source: Path, folder: Path, layer_names: Mapping[str, TrainedLayer]) -> None:
    """Give every layer's file, which is never written again, a name in another folder, too; or copy
    it there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for decoder_layer in layer_names:
        try:
            os.link(file_of(source, decoder_layer), file_of(folder, decoder_layer))
        except OSError:
            shutil.copyfile(file_of(source, decoder_layer), file_of(folder, decoder_layer))
