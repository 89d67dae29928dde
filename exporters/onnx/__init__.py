"""A checkpoint as an ONNX graph for ONNX Runtime, written only when it has been shown to compute
the same.

The graph is traced without its large weights, and those go from the source into their file one
layer at a time, while the stock model answers everything that the graph will be asked. Then ONNX
Runtime is asked; where the model does not fit into memory, the graph's weights are mapped from
their file."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor

from compressor.answers.lm_eval_run import fits_whole
from compressor.checkpoint.reader import MODELOPT
from compressor.checkpoint.source import locate
from compressor.document.blocks import Block, Facts, Heading, Text
from compressor.errors import CompressionError, reason_of
from compressor.extras import ONNX, require
from compressor.files import GRAPH, TOOL, new_folder
from compressor.formatting import human_bytes
from compressor.memory import give_back
from compressor.model.architecture import experts_modules
from compressor.model.loading import PartialModel
from compressor.model.moe_layer import decoder_layer_of
from compressor.model.opened import OpenModel, open_model
from compressor.model.remote_code import json_bytes, without_code
from compressor.model.verification import check_carried
from compressor.options import NamedOptions
from compressor.progress import Progress, Silent
from compressor.records import read_object, value_as
from compressor.run_record import COMPRESSION, versions
from compressor.steps.job import carried_files
from compressor.steps.workdir import check_space, check_target, put
from exporters.onnx.moe import SCALES, LayerRoute, moe_node, round_experts, use_nodes
from exporters.onnx.quantise import SCHEMES, Scheme
from exporters.onnx.reference import TOKENS, Reference, observe
from exporters.onnx.trace import (
    AbsentWeight,
    absent_weight,
    export_graph,
    trace_inputs,
    traced_model,
)
from exporters.onnx.verify import (
    EXACT,
    HALF,
    STOCK,
    Graph,
    RoundingCost,
    Verification,
    compare,
    rounding_cost,
)

WEIGHTS = "model.onnx.data"
INLINE_BYTES = 1024  # a tensor no larger than this stays in the graph, where optimisers can read it
DTYPES = {"fp32": "float32", "fp16": "float16"}
FORMATS = {"none": None, **SCHEMES}  # of the experts' weights
# above this the weights lie in a file of their own; a graph file ends at 2 GB
EXTERNAL_BYTES = 64 * 2**20
RECORD = "onnx_export.json"
PACKAGES = (
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnx-ir",
    "torch",
    "transformers",
    "moe-compressor",
)
# options that change nothing of the graph
UNRECORDED = (
    "overwrite",
    "external_bytes",
    "stream",
)
# of the summary
RECORDED = (
    "model",
    "nodes",
    "inputs",
    "outputs",
    "routes",
    "verification",
    "rounding",
)


class ExportOptions(NamedOptions):
    """Options of the graph and its verification."""

    opset: Literal[18, 19, 20, 21, 22, 23] = 20
    """Version of the ONNX operators."""
    dtype: Literal["fp32", "fp16"] = "fp32"
    """Data type of the weights."""
    quantize: Literal["none", "int8", "int4"] = "none"
    """Experts' weights: none, int8 (by row) or int4 (by blocks of 32)."""
    past: bool = True
    """Have the KV cache as inputs and outputs."""
    overwrite: bool = False
    """Replace an existing output."""
    external_bytes: int = EXTERNAL_BYTES
    """Bytes of weights above which they go to a file of their own."""
    tokens: int = TOKENS
    """Greedy tokens to compare with the checkpoint's."""
    stream: bool | None = None
    """Map the weights from their file to verify (default: where the model does not fit into
    memory)."""

    @property
    def scheme(self) -> Scheme | None:
        return FORMATS[self.quantize]


Options = ExportOptions  # under this name the registry finds an exporter's options


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """The graph that was written, and how well it agrees with the stock model."""

    folder: Path
    model: str
    nbytes: int
    external: bool  # whether the weights lie in a file of their own
    nodes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    routes: tuple[LayerRoute, ...]
    verification: Verification
    rounding: RoundingCost | None = None  # what quantising changed in the stock model

    @property
    def fallen_back(self) -> tuple[LayerRoute, ...]:
        """The MoE layers that are not a single node, with the reason."""
        return tuple(route for route in self.routes if route.reason is not None)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "folder": str(self.folder),
            "fallen_back": len(self.fallen_back),
        }

    def describe(self) -> tuple[Block, ...]:
        """Return the MoE layers of the graph that are a single node, and how well it agrees with
        the stock model."""
        checked = self.verification
        cost = self.rounding
        facts = {
            "file": human_bytes(self.nbytes)
            + (", weights in a file of their own" if self.external else ""),
            "nodes": str(self.nodes),
            "MoE layers as one node": f"{len(self.routes) - len(self.fallen_back)} of "
            f"{len(self.routes)}",
            "largest logit difference": f"{checked.largest_difference:.1e} (allowed "
            f"{checked.tolerance:.1e})",
            "compared with": checked.reference,
            "verified": checked.how,
            "greedy tokens": f"{checked.tokens_equal} of {checked.tokens_compared} the same",
        }
        if checked.ties:
            facts["near ties of routers"] = (
                f"{checked.ties} of {checked.tokens} tokens got another expert"
            )
        if cost is not None:
            facts["cost of rounding"] = (
                f"logits differ by up to {cost.largest_difference:.2g} of "
                f"{cost.largest_logit:.2g}, "
                f"{cost.same_choice:.1%} of argmax tokens the same"
            )
        others = (
            Text(f"{route.layer}: {route.route}, since {route.reason}")
            for route in self.fallen_back
        )
        return Heading(f"{self.model} as ONNX"), Facts(tuple(facts.items())), *others


class GraphFile:
    """A graph in the making: `program` is an onnx_ir model whose large weights are absent.

    They go to a file of their own if all tensors together have more than `external_bytes`, and to
    the graph otherwise."""

    def __init__(self, program: Any, folder: Path, external_bytes: int) -> None:
        self.program = program
        self.folder = folder
        self.values = dict(program.graph.initializers)
        # by the tensor of the model, then by the initialiser
        self.absent: dict[str, dict[str, AbsentWeight]] = {}
        for key, value in self.values.items():
            absent = absent_weight(value)
            if absent is not None:
                self.absent.setdefault(absent.source, {})[key] = absent
        sizes = {key: value.const_value.nbytes for key, value in self.values.items()}
        self.offsets: dict[str, int] = {}  # in the file of weights
        if sum(sizes.values()) > external_bytes:
            end = 0
            for key, nbytes in sizes.items():
                if nbytes > INLINE_BYTES:
                    self.offsets[key] = end
                    end += nbytes
            (folder / WEIGHTS).touch()
            os.truncate(folder / WEIGHTS, end)
            for key in self.offsets:
                if absent_weight(self.values[key]) is None:
                    self._write(key, self.values[key].const_value.tobytes())

    def put(self, source: str, value: Tensor) -> None:
        """Take a tensor of the model, of the shape and dtype that was traced."""
        import onnx_ir

        for key, absent in self.absent[source].items():
            content = absent.made_of(value.detach())
            traced = self.values[key].const_value
            assert (
                tuple(content.shape) == tuple(traced.shape) and content.nbytes == traced.nbytes
            ), source
            if key in self.offsets:
                self._write(key, content.reshape(-1).view(torch.uint8).numpy().data)
            else:
                self.values[key].const_value = onnx_ir.tensor(content, name=key)

    def save(self) -> None:
        """Write the graph and check it. All tensors must have been put."""
        import onnx
        import onnx_ir

        for key, offset in self.offsets.items():
            value = self.values[key]
            stored = value.const_value
            value.const_value = onnx_ir.ExternalTensor(
                WEIGHTS,
                offset,
                stored.nbytes,
                stored.dtype,
                shape=stored.shape,
                name=key,
                base_dir=self.folder,
            )
        onnx_ir.save(self.program, self.folder / GRAPH)
        try:
            onnx.checker.check_model(str(self.folder / GRAPH), full_check=True)
        except Exception as error:  # a class for each kind of fault
            raise CompressionError(
                f"the exported graph is not sound ONNX: {reason_of(error)}"
            ) from error

    def _write(self, key: str, content: Any) -> None:
        with (self.folder / WEIGHTS).open("r+b") as file:
            put(content, file.fileno(), self.offsets[key])


def require_packages() -> None:
    require(*ONNX)


def export(
    folder: Path,
    out: Path,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
) -> ExportSummary:
    """Export the checkpoint in `folder` to `out`: graph, weights, configs, tokenizer, and a record
    of the verification.

    Raises `CompressionError` and leaves nothing if it fails.
    """
    options = options or ExportOptions()
    progress = progress or Silent()
    require_packages()
    out = Path(out).absolute()
    check_target(out, options.overwrite)
    opened = open_model(locate(str(folder)), DTYPES[options.dtype], "cpu")
    check_carried(opened.source.folder)
    check_space(
        out,
        sum(value.numel() * value.element_size() for value in opened.partial.empty.values()),
    )
    with new_folder(out, partial(check_target, out, options.overwrite)) as content:
        graph, routes, reference, original = write_graph(opened, content, options, progress)
        mapped = (
            not fits_whole(opened.source, "float32", "cpu")
            if options.stream is None
            else options.stream
        )
        exported = Graph(content / GRAPH, mapped)
        changes = (
            [f"experts rounded to {options.scheme.describe()}"]
            if options.scheme is not None
            else []
        )
        bounds = EXACT
        if options.dtype == "fp16":
            changes.insert(0, "weights rounded to float16")
            bounds = HALF
        label = f"{STOCK} with {' and '.join(changes)}" if changes else STOCK
        program = graph.program.graph
        summary = ExportSummary(
            folder=out,
            model=reference.model,
            **_sizes(content),
            verification=compare(
                exported.answers(reference.cases, progress),
                reference,
                bounds,
                label,
                exported.how,
            ),
            rounding=None if original is None else rounding_cost(original, reference),
            nodes=sum(1 for _ in program.all_nodes()),
            inputs=tuple(value.name for value in program.inputs),
            outputs=tuple(value.name for value in program.outputs),
            routes=routes,
        )
        _write_files(opened, content, options, summary)
    return summary


def write_graph(
    opened: OpenModel, folder: Path, options: ExportOptions, progress: Progress
) -> tuple[GraphFile, tuple[LayerRoute, ...], Reference, Reference | None]:
    """Trace the model, observe the stock one, and write each layer's weights while its cases pass
    them.

    Returns the graph, how each MoE layer is written, the stock model's logits (with rounded weights
    where they are rounded), and those before rounding if so. At most two layers, the graph and the
    embedding are in memory."""
    scheme = options.scheme
    inner = opened.partial
    if options.past and not inner.model.can_generate():
        kind = type(inner.model).__name__
        raise CompressionError(f"{kind} does not generate text, so it has no cache; pass --no-past")
    progress.start("tracing", 2)
    empty = PartialModel(inner.checkpoint, inner.config, inner.dtype, inner.device)
    model, mode = traced_model(empty, scheme)
    routes = use_nodes(model, scheme)
    progress.advance("experts")
    program = export_graph(model, trace_inputs(model, options.past, mode), options.opset)
    graph = GraphFile(program, folder, options.external_bytes)
    progress.advance("graph")
    by_decoder_layer: dict[str, list[str]] = {}
    for source in graph.absent:
        by_decoder_layer.setdefault(
            decoder_layer_of(source, opened.architecture.decoder_layers), []
        ).append(source)
    nodes = {route.layer for route in routes if route.reason is None}

    def shown(partial: PartialModel, decoder_layer: str) -> None:
        tensors = dict[str, Tensor]()  # of MoE nodes, which are not those of the model
        for name, experts in experts_modules(partial.model):
            if not name.startswith(f"{decoder_layer}."):
                continue
            if scheme is not None:
                round_experts(experts, scheme)
            if name in nodes:
                tensors |= {
                    f"{name}.{key}": value for key, value in moe_node(experts, scheme)[1].items()
                }
            vars(experts).pop(SCALES, None)
        for source in by_decoder_layer.get(decoder_layer, ()):
            graph.put(
                source,
                tensors[source]
                if source in tensors
                else partial.model.get_parameter_or_buffer(source),
            )
        give_back()

    original = None if scheme is None else observe(opened, False, 0, progress)
    reference = observe(opened, options.past, options.tokens, progress, shown)
    for source in by_decoder_layer.get("", ()):  # what belongs to no layer, one tensor at a time
        inner.load([source])
        graph.put(source, inner.model.get_parameter_or_buffer(source))
        inner.release(source.rpartition(".")[0])
        give_back()
    inner.release("")
    graph.save()
    return graph, routes, reference, original


def read_summary(out: Path) -> ExportSummary:
    """Return what `export` returned, from the record that it left in `out`."""
    record = read_object(out / RECORD)
    kinds = get_type_hints(ExportSummary)
    recorded = {
        name: value_as(record.get(name), kinds[name], f"{out / RECORD}: {name}")
        for name in RECORDED
    }
    return ExportSummary(folder=out, **_sizes(out), **recorded)


def _sizes(folder: Path) -> dict[str, Any]:
    files = [path for path in (folder / GRAPH, folder / WEIGHTS) if path.exists()]
    return {"nbytes": sum(path.stat().st_size for path in files), "external": len(files) > 1}


def plain_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config, and the configs inside it, without how weights are quantised: the graph's are
    not."""
    config = {}
    for name, value in raw.items():
        if name != "quantization_config":
            config[name] = plain_config(value) if isinstance(value, dict) else value
    return config


def _write_files(
    opened: OpenModel, content: Path, options: ExportOptions, summary: ExportSummary
) -> None:
    """Write configs, tokenizer and the record, without times and folders, so that equal runs give
    equal records."""
    files = carried_files(opened.source.folder)
    files.pop(MODELOPT, None)  # as config.json says nothing of quantisation any more
    carried = sorted(files)
    compression = opened.source.folder / COMPRESSION
    if compression.is_file():
        files[COMPRESSION] = compression
    for name, source in files.items():
        (content / name).parent.mkdir(exist_ok=True)
        (content / name).write_bytes(source if isinstance(source, bytes) else source.read_bytes())
    result = asdict(summary)
    record = {
        "tool": TOOL,
        "versions": versions(PACKAGES),
        "source": opened.source.label,
        "files": carried,
        "options": {
            name: value for name, value in options.model_dump().items() if name not in UNRECORDED
        },
        **{name: result[name] for name in RECORDED},
    }
    config = plain_config(without_code(opened.checkpoint.raw_config))
    for name, values in (("config.json", config), (RECORD, record)):
        (content / name).write_bytes(json_bytes(values))
