"""The stock model as one ONNX graph: prefill, decode and chunks, with the cache's tensors as inputs
and outputs.

Large weights are absent while the graph is traced: their initialisers have an `AbsentWeight` in
place of values."""

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from compressor.errors import CompressionError, reason_of
from compressor.frozen import frozen
from compressor.model.architecture import experts_modules
from compressor.model.experts import parameter_names
from compressor.model.inputs import cache_argument
from compressor.model.loading import PartialModel, set_tensor
from compressor.progress import quiet_transformers
from exporters.onnx.moe import round_experts
from exporters.onnx.quantise import Scheme
from exporters.onnx.reference import model_inputs

CACHE = "past_key_values"
# batch and past of the two samples whose cache shapes are compared; none is 0 or 1
SAMPLES = (
    (2, 5),
    (3, 7),
)
SAMPLE_LENGTH = 3
# of a layer that works in chunks; from one or fewer, a trace would learn that there is one
CHUNKS = 2.5
LARGEST_CHUNK = 1024  # of a recurrent layer; longer ones are windows of attention
RENAMED = {"keys": "key", "values": "value", "cache": CACHE}
SYMBOL = re.compile(r"\b[a-z]+\d+\b")
STOCK = "transformers.models."
SMALL = 8192  # elements: with larger constants the optimiser computes nothing


@frozen
class AbsentWeight:
    """The source of an initialiser in the traced model: a tensor's name, and the order of its axes
    if changed.

    Called, it stands in for the absent values before the optimiser, which looks for equal small
    tensors."""

    source: str
    order: tuple[int, ...] | None = None

    def __call__(self) -> Any:
        import onnx_ir

        return onnx_ir.tensor(np.frombuffer(repr(self).encode(), np.uint8))


def absent_weight(value: Any) -> AbsentWeight | None:
    """Return the weight that an initialiser lacks; None for any other value."""
    raw = getattr(getattr(value, "const_value", None), "raw", None)
    return raw if isinstance(raw, AbsentWeight) else None


def traced_model(partial: PartialModel, scheme: Scheme | None) -> tuple[Any, FakeTensorMode]:
    """The stock model of an empty `partial` with its small tensors, and the mode of its absent
    weights.

    Both weights of experts are there or neither, rounded by a scheme. Tied weights stay tied.
    """
    absent = {key for key, value in partial.empty.items() if value.numel() > SMALL}
    experts = dict(experts_modules(partial.model))
    for name, module in experts.items():
        pair = {f"{name}.{key}" for key in parameter_names(module)[:2]}
        absent |= pair if absent & pair else set()
    absent |= {key for key in partial.empty if partial.tied.get(key, key) in absent}
    partial.load(key for key in partial.empty if key not in absent)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    stand_ins: dict[str, nn.Parameter] = {}
    for key in sorted(absent):
        source = partial.tied.get(key, key)
        value = partial.empty[key]
        if source not in stand_ins:
            with mode:
                stand_ins[source] = nn.Parameter(
                    torch.empty_like(value, device="cpu"), requires_grad=False
                )
        set_tensor(partial.model, key, stand_ins[source])
    if scheme is not None:
        for module in experts.values():
            round_experts(module, scheme)
    return partial.model, mode


@frozen
class TraceInputs:
    """The inputs that a model is traced with: example inputs, and the cache tensors among them."""

    sample: dict[str, Any]
    # by name in the graph: which axes grow with what (batch or past)
    cache: Mapping[str, Mapping[int, str]]


def graph_name(path: str) -> str:
    """past_key_values.layers.3.keys or cache.layers.3.keys -> past_key_values.3.key; other states
    keep their names."""
    return ".".join(RENAMED.get(part, part) for part in path.split(".") if part != "layers")


def _axes(path: str, one: Tensor, two: Tensor) -> dict[int, str]:
    """Return the axes in which two samples' cache tensors differ, and with what they grow."""
    batches, pasts = zip(*SAMPLES, strict=True)
    known = {batches: "batch", pasts: "past"}
    axes = {}
    for axis, sizes in enumerate(zip(one.shape, two.shape, strict=True)):
        if sizes in known:
            axes[axis] = known[sizes]
        elif sizes[0] != sizes[1]:
            raise CompressionError(
                f"the cache tensor {path} grows from {sizes[0]} to {sizes[1]} entries while the "
                f"past grows from {pasts[0]} to {pasts[1]} tokens, so no graph input can stand "
                "for it; export it with --no-past"
            )
    return axes


@torch.no_grad()
def trace_inputs(model: Any, past: bool, mode: FakeTensorMode | None = None) -> TraceInputs:
    """Example inputs in the model's own dtype; of the cache, the shapes at two sizes tell which
    axes are dynamic.

    In the `mode` of absent weights only shapes are worked out, and the cache is filled with zeros.
    Without one the model computes, so its experts must not be in a node's layout yet."""
    from transformers import cache_utils as stock
    from transformers.exporters.utils import get_leaf_tensors

    argument = cache_argument(model)
    config = model.config.get_text_config(decoder=True)
    new = SAMPLE_LENGTH  # or enough tokens for several chunks of recurrent layers
    for name, size in vars(config).items():
        if name.endswith("chunk_size") and isinstance(size, int) and size <= LARGEST_CHUNK:
            new = max(new, int(CHUNKS * size))
    caches = []
    samples = []
    for batch, length in SAMPLES:
        if not past:
            length = 0
        tokens = torch.arange(batch * (length + new)).view(batch, -1) % 30 + 1
        samples.append(model_inputs(model, tokens[:, length:], length))
        if not past:
            return TraceInputs(samples[0], {})
        cache = stock.DynamicCache(config=config)
        # sliding layers keep every key, as the mask applies the window, so that the graph stays one
        for index, layer in enumerate(cache.layers):
            if type(layer) is stock.DynamicSlidingWindowLayer:
                cache.layers[index] = stock.DynamicLayer()
            elif type(layer) is stock.LinearAttentionAndSlidingWindowAttentionLayer:
                cache.layers[index] = stock.LinearAttentionAndFullAttentionLayer(
                    number_of_states=layer.number_of_states
                )
        try:
            with mode or contextlib.nullcontext():
                model(
                    **model_inputs(model, tokens[:, :length]),
                    use_cache=True,
                    **{argument: cache},
                )
        except Exception as error:  # models raise what they like
            fault = _rotation_fault(model, error)
            reason = f"cannot be exported: {fault}"
            if fault is None:
                cause = reason_of(error, 160)
                reason = f"does not run with a cache ({cause}); export it with --no-past"
            raise CompressionError(f"{type(model).__name__} {reason}") from error
        caches.append(cache)
    one, two = (get_leaf_tensors({argument: cache}) for cache in caches)
    if set(one) != set(two) or not one:
        name = type(model).__name__
        raise CompressionError(
            f"the cache of {name} is not made of tensors alone; export it with --no-past"
        )
    tensors = {graph_name(path): _axes(path, value, two[path]) for path, value in one.items()}
    for layer in caches[0].layers:
        for name, value in vars(layer).items():
            filled = tree_map_only(
                FakeTensor, lambda fake: torch.zeros(fake.shape, dtype=fake.dtype), value
            )
            setattr(layer, name, filled)
    for module in model.modules():  # rotary embeddings for long texts keep what they compute
        for name in [name for name, value in vars(module).items() if isinstance(value, FakeTensor)]:
            delattr(module, name)
    return TraceInputs({**samples[0], argument: caches[0]}, tensors)


@contextlib.contextmanager
def _symbolic_minimum(model: Any) -> Iterator[None]:
    """Keep `min` and `max` of a length in the graph: a sparse attention's min(index_topk, length)
    would be decided by the example's length, and be wrong for every other one."""

    def extremum(plain: Any, symbolic: Any, *values: Any, **options: Any) -> Any:
        traced = len(values) == 2 and any(isinstance(value, torch.SymInt) for value in values)
        return symbolic(*values) if traced else plain(*values, **options)

    names = {type(module).__module__ for module in model.modules()}
    modules = [sys.modules[name] for name in names if name.startswith(STOCK)]
    low = partial(extremum, min, torch.sym_min)
    high = partial(extremum, max, torch.sym_max)
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.multiple(module, create=True, min=low, max=high))
        yield


def _rotation_fault(model: Any, error: BaseException) -> str | None:
    """Return why a trace failed if rotary embeddings that depend on the text's length are why."""
    kinds = set[str]()
    for module in model.modules():
        named = getattr(module, "rope_type", "")
        kinds |= {*named.values()} if isinstance(named, dict) else {named}
    rotations = sorted(kind for kind in kinds if kind == "longrope" or "dynamic" in kind)
    is_branch = "data-dependent" in str(error) or "_local_scalar_dense" in str(error)
    if not rotations or not is_branch:
        return None
    return (
        f"its rotary embeddings ({', '.join(rotations)}) take another branch for longer texts, "
        "and a graph has only one; set rope_type to default in a copy's config.json for texts "
        "that need no scaling"
    )


def export_graph(model: Any, inputs: TraceInputs, opset: int) -> Any:
    """The onnx_ir model of a stock model, with clean names and axes; raises `CompressionError` with
    the reason."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass
    from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    dynamic = torch.export.Dim.AUTO
    shapes: dict[str, Any] = {name: {0: dynamic, 1: dynamic} for name in inputs.sample}
    if inputs.cache:
        shapes[cache_argument(model)] = [
            dict.fromkeys(axes, dynamic) for axes in inputs.cache.values()
        ]
    settings = OnnxConfig(dynamic_shapes=shapes, opset_version=opset, optimize=False)
    sample = {**inputs.sample, "use_cache": bool(inputs.cache)}
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(io.StringIO()),
            quiet_transformers(),
            _symbolic_minimum(model),
        ):
            program = OnnxExporter().export(model, sample, settings).program
            optimise(program)
    except Exception as error:  # torch and onnxscript raise many classes
        cause: BaseException = error
        while cause.__cause__ is not None:  # the innermost says what is wrong
            cause = cause.__cause__
        reason = _rotation_fault(model, cause) or reason_of(cause)
        message = f"{type(model).__name__} cannot be traced as one ONNX graph: {reason}"
        raise CompressionError(message) from error
    finally:
        logging.disable(logging.NOTSET)
    # a trace writes RMS norms as x * (1 / sqrt(v)); ONNX Runtime 1.31 fuses x / sqrt(v) into one
    # operator
    rule = RewriteRule(
        lambda op, x, v: op.Mul(x, op.Reciprocal(op.Sqrt(v))),
        lambda op, x, v: op.Div(x, op.Sqrt(v)),
        remove_nodes=False,
    )
    RewriteRuleSet([rule], commute=True).apply_to_model(program)
    RemoveUnusedNodesPass()(program)
    _rename(program, inputs.cache)
    return program


def optimise(program: Any) -> None:
    """Do to an onnx_ir model, in place, what torch.onnx does after a trace, without the values of
    absent weights."""
    import onnx_ir
    from onnx_ir.passes.common import InlinePass
    from onnxscript.optimizer import optimize_ir
    from onnxscript.rewriter.onnx_fusions import fuse

    for value in program.graph.initializers.values():
        stored = value.const_value
        if isinstance(getattr(stored, "raw", None), FakeTensor):
            value.const_value = onnx_ir.LazyTensor(
                AbsentWeight(stored.name), dtype=stored.dtype, shape=stored.shape, name=stored.name
            )
    InlinePass()(program)
    # a transposition of an absent weight that nothing else reads becomes the order of its axes
    for node in list(program.graph):
        if (node.domain, node.op_type) != ("", "Transpose"):
            continue
        value = node.inputs[0]
        absent = absent_weight(value)
        if absent is None or len(value.uses()) > 1:
            continue
        (output,) = node.outputs
        stored = value.const_value
        order = tuple(node.attributes.get_ints("perm", range(len(stored.shape))[::-1]))
        before = absent.order or range(len(order))
        lazy = onnx_ir.LazyTensor(
            AbsentWeight(absent.source, tuple(before[axis] for axis in order)),
            dtype=stored.dtype,
            shape=onnx_ir.Shape([stored.shape[axis] for axis in order]),
            name=output.name,
        )
        turned = onnx_ir.Value(
            name=output.name,
            shape=lazy.shape,
            type=onnx_ir.TensorType(lazy.dtype),
            const_value=lazy,
        )
        onnx_ir.convenience.replace_all_uses_with(output, turned)
        program.graph.remove(node, safe=True)
        program.graph.initializers.pop(value.name)
        program.graph.register_initializer(turned)
    with quick_matching():
        optimize_ir(
            program,
            should_fold=lambda node: False if any(map(absent_weight, node.inputs)) else None,
        )
        fuse(program)


@contextlib.contextmanager
def quick_matching() -> Iterator[None]:
    """While the block runs, a pattern with several outputs is tried only on nodes that may be the
    first of them.

    onnxscript's matcher lists the whole graph once for each node and each such pattern: for a
    hundred layers that takes longer than all the rest of an export."""
    try:
        from onnxscript.rewriter._basics import MatchResult
        from onnxscript.rewriter._matcher import SimplePatternMatcher

        stock_match = SimplePatternMatcher.match
    except (ImportError, AttributeError):
        # another version of onnxscript, which may be as quick by itself
        yield
        return

    def match(self: Any, model: Any, graph: Any, node: Any, *more: Any, **named: Any) -> Any:
        if not self.pattern.has_single_output_node:
            first = self.pattern.output_nodes[0].op_identifier()
            if first is not None and first != node.op_identifier():
                return MatchResult().fail("the node is not the first output's")
        return stock_match(self, model, graph, node, *more, **named)

    with patch.object(SimplePatternMatcher, "match", match):
        yield


def _rename(program: Any, cache: Mapping[str, Mapping[int, str]]) -> None:
    """Give inputs, outputs and axes their names, and drop what a trace has noted at nodes."""
    import onnx_ir

    graph = program.graph
    for value in graph.inputs:
        value.name = graph_name(value.name.removeprefix("input."))
    # past_key_values.3.key -> present.3.key, which holds a cache tensor after the new tokens
    present = {name: name.replace(CACHE, "present", 1) for name in cache}
    for value in graph.outputs:
        name = graph_name(value.name.removeprefix("output."))
        value.name = present.get(name, name)
    wanted = {"logits", *present.values()}
    for value in [value for value in graph.outputs if value.name not in wanted]:
        graph.outputs.remove(value)
    assert wanted == {value.name for value in graph.outputs}
    symbols: dict[str, str] = {}
    for value in graph.inputs:
        length = "total" if cache and value.name == "attention_mask" else "sequence"
        for axis, name in cache.get(value.name, {0: "batch", 1: length}).items():
            size = value.shape[axis]
            if isinstance(size, int):
                raise CompressionError(
                    "the stock model cannot be traced as one ONNX graph: its Python code depends "
                    f"on the {name} axis of {value.name} (a loop over tokens, say), which the "
                    f"trace fixes at the example's {size}"
                )
            if size.value is not None:
                symbols.setdefault(size.value, name)
        value.metadata_props.clear()
    values = list(graph.inputs)
    for node in graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        values += node.outputs
    for value in values:
        if value.shape is None:
            continue
        dims = list(value.shape)
        for axis, dim in enumerate(dims):
            if isinstance(dim, int) or dim.value is None:
                continue
            text = SYMBOL.sub(lambda match: symbols.get(match.group(), match.group()), dim.value)
            if text in ("past + sequence", "sequence + past"):
                text = "total"
            known = symbols.keys() >= {*SYMBOL.findall(dim.value)}
            dims[axis] = onnx_ir.SymbolicDim(text if known else None)
        value.shape = onnx_ir.Shape(dims)
