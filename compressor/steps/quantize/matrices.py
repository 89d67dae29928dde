"""The weight matrices to quantise: the names under which they are stored, and how they lie in the
model's tensors.

Experts are stored one module each: by the names that their family publishes where transformers
knows such, also if this checkpoint stores them fused, and otherwise as `<experts
module>.<number>.gate_proj`, `.up_proj` and `.down_proj`."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import dot_natural_key

from compressor.model.architecture import build_meta
from compressor.model.experts import matrix_of, parameter_names
from compressor.model.loading import KeyMap, map_keys, saved_names
from compressor.model.moe_layer import MoeLayer, decoder_layer_of
from compressor.model.opened import OpenModel
from compressor.steps.quantize.options import UNITS

EXPERTS, DENSE = UNITS
ALL = "all"
# by servers, into one matrix
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
# the parts in a tensor of experts, by the last part of its name; in any other are gate and up
PARTS: Mapping[str, tuple[str, ...]] = {"down_proj": ("down",), "up_proj": ("up",)}
GATE_AND_UP = ("gate", "up")
NUMBERED = re.compile(r"(\w+)\.(\d+)\.(.*)")  # the end of a name, from a layer's number on


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix [rows, columns]: one of an expert's, or a dense layer's own."""

    module: str  # name under which it is stored
    key: str  # state-dict entry that it is, or is a part of
    decoder_layer: str
    rows: int
    columns: int
    owner: str  # the module that holds the entry
    expert: int | None = None
    part: str = ""  # of an expert: gate, up or down

    @property
    def together(self) -> str:
        """A name that it shares with those that servers fuse with it, which then share NVFP4's
        global scale."""
        parent, _, leaf = self.module.rpartition(".")
        if self.expert is not None:
            return f"{self.owner}.{self.expert}.{'down' if self.part == 'down' else 'in'}"
        return next((f"{parent}.{others[0]}" for others in FUSED if leaf in others), self.module)

    @property
    def unit(self) -> str:
        """Which of its decoder layer's units it belongs to."""
        return DENSE if self.expert is None else EXPERTS

    def of(self, model: nn.Module) -> Tensor:
        """Return the matrix [rows, columns] in a live model: a view, which can be written into."""
        return self.within(model, attrgetter(self.key)(model))

    def within(self, model: nn.Module, value: Tensor) -> Tensor:
        """Return the matrix [rows, columns] in a `value` of its entry, as a view."""
        if self.expert is None:
            return value
        experts = model.get_submodule(self.owner)
        return matrix_of(experts, self.key.rpartition(".")[2], value[self.expert], self.part)


@dataclass(frozen=True, slots=True)
class Matrices:
    """All matrices to quantise in the order of the layers, and the tensors that hold them now."""

    every: tuple[Matrix, ...]
    replaced: frozenset[str]  # tensors of the output, if it were not quantised, that these replace
    ignored: tuple[str, ...]  # names of linear modules and routers that stay as they are
    names: Mapping[str, str]  # stored names of tensors that are loaded as they are, by key
    # by stored name, of tensors whose family publishes them under another one
    published: Mapping[str, str]
    singly: bool  # True if stock transformers knows experts that are stored one by one
    stored: bool  # True if they can be read from stored tensors, without loading the layer

    def of(self, decoder_layer: str) -> list[Matrix]:
        return [matrix for matrix in self.every if matrix.decoder_layer == decoder_layer]


def find_matrices(
    model: OpenModel, targets: str, layers: Mapping[str, Mapping[str, str]] | None = None
) -> Matrices:
    """Return the routed experts' matrices, or with `ALL` those of attention and dense layers, too;
    from headers alone. With `layers` these are the units that have a number format there.

    Routers, norms, embeddings, the head, gates of one output, and what is stored otherwise than by
    itself stay."""
    partial = model.partial
    architecture = model.architecture
    experts = _experts_keys(partial.model, architecture.layers)
    in_experts = {key: layer for key, layer in experts.items() if key not in partial.tied}
    by_itself = model.layout.regular and not model.layout.quantized
    # True if experts are stored as they are, or as matrices [rows, columns] of single experts
    stored = by_itself
    patterns = set[str]()
    for name, key in partial.plain_keys.targets.items():
        pattern = partial.plain_keys.patterns[name]
        if key in in_experts and pattern is not None:
            patterns.add(pattern)
    for pattern in patterns:
        operations = getattr(partial.converter_of(pattern), "operations", ())
        kinds = [type(operation).__name__ for operation in operations]
        if "*" not in pattern or any("Transpose" in kind for kind in kinds):
            stored = False
    shapes = {name: info.shape for name, info in model.checkpoint.tensors.items()}
    keys: KeyMap = partial.plain_keys
    singles = _names_of_experts(partial, keys, in_experts)
    if not (stored and singles):
        plain = build_meta(architecture.config, partial.dtype)
        saved = saved_names(plain, dict(plain.state_dict()))
        shapes = {name: tuple(value.shape) for name, value in saved}
        keys = map_keys(shapes, partial.model, partial.plain_conversions)
        singles = _names_of_experts(partial, keys, in_experts)
    source = partial.plain_keys if stored else keys
    names = {key: name for name, key in source.targets.items() if source.patterns[name] is None}
    published = {
        names[key]: name
        for name, key in keys.targets.items()
        if keys.patterns[name] is None and key in names
    }
    matrices = [*_of_experts(partial.model, in_experts, singles)]
    if targets == ALL:
        matrices += _dense(model, keys, shapes)
    if layers is not None:
        formats = {layer: {*units} for layer, units in layers.items()}
        matrices = [one for one in matrices if one.unit in formats.get(one.decoder_layer, ())]
    order = architecture.decoder_layers.index
    matrices.sort(key=lambda matrix: order(matrix.decoder_layer))
    quantized = {matrix.key for matrix in matrices}
    written = {key: name for name, key in keys.targets.items()}
    ignored = set()
    for name, module in partial.model.named_modules():
        # routers, too, which are no linear modules in transformers, but in servers
        is_matrix = getattr(getattr(module, "weight", None), "ndim", 0) == 2
        if is_matrix and not isinstance(module, nn.Embedding) and f"{name}.weight" not in quantized:
            ignored |= {name, written.get(f"{name}.weight", name).removesuffix(".weight")}
    return Matrices(
        every=tuple(matrices),
        replaced=frozenset(name for name, key in source.targets.items() if key in quantized),
        ignored=tuple(sorted(ignored)),
        names=names,
        published=published,
        singly=bool(singles),
        stored=stored,
    )


def target_patterns(matrices: Iterable[Matrix]) -> list[str]:
    """Return compressed-tensors' patterns for the modules of whole units, one for all layers and
    experts of a kind; by the names that they have in checkpoints and in transformers.

    transformers takes the first pattern that speaks of experts for that of the routed ones: theirs
    come first, and others spell the word in another way."""
    layers: dict[tuple[str, str], dict[str, None]] = {}
    for matrix in sorted(matrices, key=lambda matrix: matrix.unit == DENSE):
        for name in (matrix.module, matrix.owner):
            found = NUMBERED.search(name)
            assert found is not None, name
            container, number, rest = found.groups()
            if matrix.expert is None:
                rest = re.escape(rest).replace("experts", "expert[s]") + "$"
            else:
                rest = re.escape(re.split(r"\.\d", rest)[0]) + r"\."
            layers.setdefault((container, rest), {})[number] = None
    patterns = []
    for (container, rest), numbers in layers.items():
        patterns.append(rf"re:.*\b{container}\.({'|'.join(numbers)})\.{rest}")
    return patterns


def expert_matrices(model: nn.Module, layers: Sequence[MoeLayer]) -> list[Matrix]:
    """Return the matrices of all routed experts of a live model, under names that need not be those
    that are stored."""
    return list(_of_experts(model, _experts_keys(model, layers), {}))


def _experts_keys(model: nn.Module, layers: Sequence[MoeLayer]) -> dict[str, MoeLayer]:
    """State-dict keys of the weights of all routed experts, and their layers."""
    keys = {}
    for layer in layers:
        for tensor in parameter_names(model.get_submodule(layer.name))[:2]:
            keys[f"{layer.name}.{tensor}"] = layer
    return keys


def _names_of_experts(
    partial: Any, keys: KeyMap, in_experts: Mapping[str, MoeLayer]
) -> dict[tuple[str, int, str], str]:
    """Return the names under which matrices of single experts are stored, by (key, expert,
    part)."""
    families: dict[tuple[str, str], list[str]] = {}
    for name, key in keys.targets.items():
        pattern = keys.patterns[name]
        if key in in_experts and pattern is not None and "*" in pattern:
            families.setdefault((key, pattern), []).append(name)
    stored = {}
    for (key, pattern), names in families.items():
        converter = partial.converter_of(pattern)
        first, *others = converter.target_patterns
        targets = [key, *(key.replace(first, other) for other in others)]
        parts = PARTS.get(key.rpartition(".")[2], GATE_AND_UP)
        part = parts[min(converter.source_patterns.index(pattern), len(parts) - 1)]
        experts = in_experts[key].experts
        # of a second target after the first's
        for number, name in enumerate(sorted(names, key=dot_natural_key)):
            place = targets[number // experts], number % experts, part
            stored[place] = name.removesuffix(".weight")
    return stored


def _of_experts(
    model: nn.Module, in_experts: Mapping[str, MoeLayer], names: Mapping[tuple[str, int, str], str]
) -> Iterator[Matrix]:
    for key, layer in in_experts.items():
        module = model.get_submodule(layer.name)
        tensor = key.rpartition(".")[2]
        for expert, part in product(range(layer.experts), PARTS.get(tensor, GATE_AND_UP)):
            rows, columns = matrix_of(module, tensor, getattr(module, tensor)[expert], part).shape
            name = names.get((key, expert, part), f"{layer.name}.{expert}.{part}_proj")
            yield Matrix(name, key, layer.decoder_layer, rows, columns, layer.name, expert, part)


def _dense(model: OpenModel, keys: KeyMap, shapes: Mapping[str, Sequence[int]]) -> Iterator[Matrix]:
    """Yield the weights of dense layers in decoder layers, where they are stored by themselves."""
    routers = tuple(f"{layer.router}." for layer in model.architecture.layers)
    modules = dict(model.partial.model.named_modules())
    for name, key in keys.targets.items():
        owner = key.removesuffix(".weight")
        module = modules.get(owner)
        if not isinstance(module, nn.Linear) or module.out_features == 1 or key.startswith(routers):
            continue
        decoder_layer = decoder_layer_of(key, model.architecture.decoder_layers)
        rows, columns = module.weight.shape
        by_itself = keys.patterns[name] is None and tuple(shapes[name]) == (rows, columns)
        # with "weight" in the module's name, loaders would take that for the tensor's own name
        named = name.endswith(".weight") and "weight" not in owner
        if decoder_layer and by_itself and named and key not in model.partial.tied:
            module_name = name.removesuffix(".weight")
            yield Matrix(module_name, key, decoder_layer, rows, columns, owner)
