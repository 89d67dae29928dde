"""The parts of a model, discovered by building the stock transformers model on meta, without tables
of names."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import reduce
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
)
from transformers.utils import ContextManagers

from compressor.checkpoint.quantized import declared_quantization
from compressor.checkpoint.reader import CONFIG, packs_nothing, quantization_of
from compressor.errors import CompressionError, reason_of
from compressor.frozen import frozen
from compressor.model.experts import fills_rows
from compressor.model.moe_layer import (
    ExpertTensor,
    MoeLayer,
    decoder_layer_of,
    layer_number,
)
from compressor.records import Json, read_object


def _tops_of(router: nn.Module, block: nn.Module, config: Any) -> Iterator[tuple[Any, str, int]]:
    """Yield the owner, attribute and value of each number that may be the top-k, the most likely
    first."""
    text = config.get_text_config()
    nodes = (getattr(router, "config", text), text)
    fields = product(nodes, ("num_experts_per_tok", "top_k_experts", "moe_topk"))
    for owner, name in ((router, "top_k"), (block, "top_k"), *fields):
        value = getattr(owner, name, None)
        if isinstance(value, int):
            yield owner, name, value


@contextmanager
def another_top_k(router: nn.Module, block: nn.Module, config: Any, top_k: int) -> Iterator[None]:
    """Have the live router choose `top_k` experts for each token while the block runs."""
    originals = list(_tops_of(router, block, config))
    for owner, name, _ in originals:
        setattr(owner, name, top_k)
    try:
        yield
    finally:
        for owner, name, value in reversed(originals):
            setattr(owner, name, value)


EXPERTS_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")
ADOPTED_PARAMETERS = {"gate_up_proj", "down_proj"}  # of modules that lack the flags alone
ADOPTED_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
PER_LAYER = "per_layer_config"  # transformers' field for what differs between layers
# raised by configs for values that they cannot have
UNFIT = (CompressionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# in names of fields that don't count experts
NOT_COUNTS = re.compile(r"(per_tok|top_?k|shared)[^.]*$")
OTHER = "it is a dense model, or an MoE architecture of another interface"
UNLIKE = {  # why an MoE architecture is not supported, by model type
    "llama4": "its router weighs what goes into an expert instead of what comes out, and its "
    "experts get every token",
    "longcat_flash": "its router also chooses zero experts, which pass a token on and have no "
    "weights",
}
KERNEL_FIELDS = {
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
}


@frozen
class Architecture:
    """Everything about a model that its config alone decides."""

    family: str
    model_class: str
    count_field: str  # dotted path of the config field that counts experts
    layers: tuple[MoeLayer, ...]
    decoder_layers: tuple[str, ...]  # decoder layers, dense ones included, in order
    config: Any = field(repr=False, compare=False)
    # other fields of smaller models, by path
    written: Json = field(default_factory=dict, compare=False)

    @property
    def experts(self) -> int:
        """The experts per layer."""
        return self.layers[0].experts

    def fields(self, count: int) -> Json:
        """Return the config's fields, by path, that smaller models have other values of."""
        return {**count_fields(self.config, self.count_field, count), **self.written}

    def with_experts(self, count: int) -> Any:
        """Return a copy of the config with this number of experts and the other fields of smaller
        models."""
        return with_fields(self.config, self.fields(count))


def with_fields(config: Any, fields: Json) -> Any:
    """Return a copy of a config with other values at dotted paths."""
    copied = copy.deepcopy(config)
    for path, value in fields.items():
        *parents, name = path.split(".")
        setattr(reduce(getattr, parents, copied), name, value)
    return copied


def count_fields(config: Any, path: str, count: int) -> Json:
    """Return the fields, by dotted path, by which a config has this number of experts; `path` leads
    to its one.

    Numbers that the config repeats for single layers go.
    """
    *parents, name = path.split(".")
    node = reduce(getattr, parents, config)
    changed: dict[str, Any] = {path: count}
    layers = {}
    for layer, fields in (node.to_dict().get(PER_LAYER) or {}).items():
        layers[int(layer)] = {key: value for key, value in fields.items() if key != name}
        if fields.get(name):
            changed[".".join([*parents, PER_LAYER])] = layers
    return changed


def load_config(folder: Path) -> Any:
    """Return the transformers config of a checkpoint folder.

    An unknown architecture or a broken config is a clear error.
    """
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # config classes raise anything
        raw = read_object(folder / CONFIG)
        kind = raw.get("model_type")
        reason = reason_of(error)
        if kind is not None and kind not in transformers.CONFIG_MAPPING:
            reason = (
                f"transformers {transformers.__version__} has no model type {kind!r}, and code of "
                "a checkpoint's own (auto_map) is never run; only stock architectures are supported"
            )
            for name in raw.get("architectures") or ():
                config_class = getattr(getattr(transformers, name, None), "config_class", None)
                if config_class is not None:
                    reason = (
                        f"transformers {transformers.__version__} has no model type {kind!r}, but "
                        f"{name}, which the config names, of type {config_class.model_type!r}; "
                        "write that as model_type in a copy of the checkpoint"
                    )
                    break
        raise CompressionError(f"transformers cannot read {folder / CONFIG}: {reason}") from error
    for fields, name in kernel_fields(config):
        fields[name] = None
    for node in (config, config.get_text_config(decoder=True)):
        if packs_nothing(getattr(node, "quantization_config", None) or {}):
            del node.quantization_config
    if not declared_quantization(config):
        declared = quantization_of(folder, {})
        if declared:
            config.quantization_config = declared
    return config


def kernel_fields(config: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the fields that choose kernels in a config or its JSON, at any depth: each as a mapping
    and a key.

    A checkpoint may name a repository there, whose code would be fetched and run; None leaves the
    choice to transformers.
    """
    nodes = [config]
    seen = set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, list | tuple):
            nodes += node
        fields = vars(node) if hasattr(node, "model_type") else node
        if isinstance(fields, dict):
            yield from ((fields, name) for name in KERNEL_FIELDS & fields.keys())
            nodes += fields.values()


def model_class(config: Any) -> type[Any]:
    """Return the stock class that the config's `architectures` names, or the causal language model
    of its type."""
    names = getattr(config, "architectures", None) or ()
    classes = [getattr(transformers, name, None) for name in names]
    for kind in (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForTokenClassification,
    ):
        classes.append(kind._model_mapping.get(type(config), None))
    for stock_class in classes:
        if isinstance(stock_class, type):
            return stock_class
    raise CompressionError(
        f"transformers has no language model for model type {config.model_type!r}; only stock "
        "architectures are supported"
    )


def build_meta(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the stock model of a config on the meta device: all shapes, no memory; the config is
    copied, not changed.

    Raises `CompressionError` where transformers cannot build it.
    """
    stock_class = model_class(config)
    wanted = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
    copied = copy.deepcopy(config)
    for fields, name in kernel_fields(copied):
        fields[name] = None
    copied.dtype = wanted
    # some classes build inner models in the dtype of their own config
    for name in getattr(copied, "sub_configs", {}):
        if getattr(copied, name, None) is not None:
            getattr(copied, name).dtype = wanted
    try:
        with ContextManagers(stock_class.get_init_context(wanted, False, False, None)):
            built = stock_class(copied).eval()
        run_any_rows(built)
        return built
    except Exception as error:  # model classes raise anything
        raise CompressionError(
            f"transformers cannot build {stock_class.__name__} from this config: {reason_of(error)}"
        ) from error


def run_any_rows(model: Any) -> None:
    """Have a stock model loop over its experts where grouped products do not take the rows of their
    matrices."""
    for _, experts in experts_modules(model):
        if not fills_rows(experts, experts.down_proj.itemsize) and hasattr(experts, "config"):
            experts.config._experts_implementation = "eager"


def head_of(model: Any) -> nn.Module | None:
    """Return the language-model head; None if the model has none."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def experts_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the experts modules with the uniform interface (`use_experts_implementation`), by full
    name.

    Those of a tower for pictures or sound that have numbers of their own by layer belong to the
    tower."""
    towers: tuple[str, ...] = ()
    for name, module in model.named_modules():  # a tower comes before its modules
        config = getattr(module, "config", None)
        fields = getattr(config, "per_layer_attributes", None) or ()
        counts = any("expert" in field and not NOT_COUNTS.search(field) for field in fields)
        if counts and config is not model.config.get_text_config():
            towers += (f"{name}.",)
        # one that lacks only the flags, as in step3p7: its weights are gated and fused, without
        # biases, and it takes (hidden, index, weights)
        if (
            not all(hasattr(module, flag) for flag in EXPERTS_FLAGS)
            and hasattr(module, "_apply_gate")
            and {key for key, _ in module.named_parameters(recurse=False)} == ADOPTED_PARAMETERS
            and tuple(signature(module.forward).parameters) == ADOPTED_ARGUMENTS
        ):
            (_, first, second) = module.gate_up_proj.shape
            (_, hidden, _) = module.down_proj.shape
            # one neuron's gate and up if they alternate, two gates if each is a half
            pair = torch.zeros(1, first if second == hidden else second)
            pair[0, :2] = 1.0
            kind: Any = type(module)
            kind.has_gate = True
            kind.has_bias = False
            kind.is_transposed = second != hidden
            kind.is_concatenated = not module._apply_gate(pair).any()
        flagged = all(hasattr(module, flag) for flag in EXPERTS_FLAGS)
        if flagged and hasattr(module, "down_proj") and not name.startswith(towers):
            yield name, module


def decoder_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of all children of every outermost ModuleList that holds experts modules, in
    model order."""
    # in model order, parents first
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    outermost = {}
    for name, _ in experts_modules(model):
        above = next((outer for outer in lists if name.startswith(f"{outer}.")), None)
        if above is None:
            raise CompressionError(
                f"experts module {name!r} lies in no list of layers; this architecture is not "
                "supported"
            )
        outermost[above] = len(lists[above])
    return tuple(f"{name}.{place}" for name, size in outermost.items() for place in range(size))


def expert_counts(model: nn.Module) -> dict[str, int]:
    """Return the number of experts of each experts module."""
    return {name: int(module.num_experts) for name, module in experts_modules(model)}


def config_numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted paths and values of all whole numbers in a config, and of all lists of
    them."""
    for key, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from config_numbers(value, f"{prefix}{key}.")
        elif {*map(type, value if isinstance(value, list) else [value])} == {int}:
            yield f"{prefix}{key}", value


def discover(config: Any, model: nn.Module | None = None) -> Architecture:
    """Return the architecture of the stock model of `config`; raise `CompressionError` if dense or
    not supported."""
    model = model if model is not None else build_meta(config)
    stock = type(model).__name__
    counts = expert_counts(model)
    if not counts:
        raise CompressionError(
            f"{stock} ({config.model_type}) has no experts module with transformers' uniform "
            f"interface: {UNLIKE.get(config.model_type.removesuffix('_text'), OTHER)}, which is "
            "not supported"
        )
    count, *others = sorted(set(counts.values()))
    if others:
        raise CompressionError(
            f"layers hold unequal numbers of experts ({[count, *others]}), which is not supported"
        )

    def order(field: tuple[str, Any]) -> tuple[bool, bool, int, str]:  # the most likely first
        path = field[0]
        return "expert" not in path, "vision" in path or "audio" in path, path.count("."), path

    # doubling the field that counts the experts doubles all experts modules
    wanted = dict.fromkeys(counts, 2 * count)
    for count_field, value in sorted(config_numbers(config), key=order):
        if value != count or NOT_COUNTS.search(count_field):
            continue
        with suppress(*UNFIT):
            doubled = build_meta(with_fields(config, count_fields(config, count_field, 2 * count)))
            if expert_counts(doubled) == wanted:
                break
    else:
        raise CompressionError(
            f"no field of the config counts the {count} experts; this architecture is not supported"
        )
    # state-dict entries that count experts differ in shape between models of E and 2E experts
    tensors = {}
    larger = doubled.state_dict()
    for key, value in model.state_dict().items():
        before = list(value.shape)
        after = list(larger[key].shape)
        changed = [dim for dim in range(len(before)) if before[dim] != after[dim]]
        if not changed:
            continue
        dim = changed[0]
        added = after[dim] - before[dim]
        if len(changed) > 1 or added != count:
            raise CompressionError(
                f"tensor {key!r} grows from {before} to {after} with the experts; not supported"
            )
        tensors[key] = ExpertTensor(key, dim, before[dim] - count)
    layer_names = decoder_layers(model)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    # the same weights under a second name
    repeated = {key.rpartition(".")[0] for key in tensors if key in tied}
    layers = tuple(
        _moe_layer(name, model, config, tensors, layer_names)
        for name in counts
        if name not in repeated
    )
    blocks = tuple(f"{layer.block}." for layer in layers)
    for key in sorted(tensors.keys() - tied):
        if not key.startswith(blocks):
            raise CompressionError(
                f"tensor {key!r} counts experts but lies outside every MoE block; not supported"
            )
    return Architecture(str(config.model_type), stock, count_field, layers, layer_names, config)


def _moe_layer(
    name: str,
    model: nn.Module,
    config: Any,
    tensors: Mapping[str, ExpertTensor],
    layer_names: Sequence[str],
) -> MoeLayer:
    """Return the layer of the experts module `name`.

    Its router is the one other child of its block with expert tensors.
    """
    block_name = name.rpartition(".")[0]
    block = model.get_submodule(block_name)
    experts: Any = model.get_submodule(name)
    inside = tuple(tensor for key, tensor in tensors.items() if key.startswith(f"{block_name}."))
    owners = {tensor.key.removeprefix(f"{block_name}.").partition(".")[0] for tensor in inside}
    routers = {
        child: module
        for child, module in block.named_children()
        if child in owners and module is not experts
    }
    if len(routers) != 1:
        raise CompressionError(
            f"MoE block {block_name!r} has {len(routers)} routers beside its experts; one is "
            "supported"
        )
    ((child, router),) = routers.items()
    router_name = f"{block_name}.{child}"
    top_k = next((value for _, _, value in _tops_of(router, block, config)), None)
    if top_k is None:
        raise CompressionError(
            "neither the router nor the config says how many experts a token is routed to "
            "(top-k); not supported"
        )
    tables = tuple(
        f"{router_name}.{key}"
        for key, value in router.state_dict().items()
        if not value.is_floating_point() and value.dim() == 2 and value.shape[1] == top_k
    )
    groups = getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1
    method = getattr(router, "topk_method", None)
    grouping = (1, 1, 1)
    if int(groups) > 1 and method != "greedy":
        chosen = getattr(router, "topk_group", None) or groups
        # a group's score is the sum of its two best experts, or that of its best one if the router
        # has a method
        grouping = (int(groups), int(chosen), 1 if method else 2)
    decoder_layer = decoder_layer_of(name, layer_names)
    return MoeLayer(
        name,
        block_name,
        router_name,
        decoder_layer,
        layer_number(decoder_layer),
        int(experts.num_experts),
        top_k,
        *grouping,
        tensors=inside,
        tables=tables,
    )
