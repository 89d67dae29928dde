"""An export: the graph, its weights, what lies beside it, and its record.

The graph is traced without its large weights, and those go from the source into their file one
layer at a time, while the stock model answers everything that the graph will be asked. Then ONNX
Runtime is asked; where the model does not fit into memory, the graph's weights are mapped from
their file."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from compressor.answers.stock import fits_whole
from compressor.checkpoint.reader import MODELOPT
from compressor.checkpoint.source import locate
from compressor.document.blocks import Block, Facts, Heading, Text
from compressor.errors import CompressionError, reason_of
from compressor.files import GRAPH, TOOL
from compressor.formatting import human_bytes
from compressor.frozen import frozen
from compressor.memory import give_back
from compressor.model.architecture import experts_modules
from compressor.model.loading import PartialModel
from compressor.model.moe_layer import decoder_layer_of
from compressor.model.opened import OpenModel, open_model
from compressor.model.remote_code import json_bytes, without_code
from compressor.model.verification import check_carried
from compressor.progress import Progress
from compressor.records import Json, read_object, value_as
from compressor.run_record import COMPRESSION, versions
from compressor.steps.job import carried_files
from compressor.steps.workdir import check_space, put
from exporters.onnx.moe import SCALES, LayerRoute, moe_node, round_experts, use_nodes
from exporters.onnx.options import DTYPES, PACKAGES, RECORD, ExportOptions
from exporters.onnx.quantise import SCHEMES, Scheme
from exporters.onnx.reference import Reference, observe
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
# options that change nothing of the graph
UNRECORDED = {"external_bytes", "stream"}
OF_FILES = ("folder", "nbytes", "external")  # of the summary, which the record leaves out


@frozen
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

    def to_dict(self) -> Json:
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
        size = human_bytes(self.nbytes)
        difference = f"{checked.largest_difference:.1e} (allowed {checked.tolerance:.1e})"
        as_one = len(self.routes) - len(self.fallen_back)
        facts = {
            "file": f"{size}, weights in a file of their own" if self.external else size,
            "nodes": str(self.nodes),
            "MoE layers as one node": f"{as_one} of {len(self.routes)}",
            "largest logit difference": difference,
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
                f"{cost.largest_logit:.2g}, {cost.same_choice:.1%} of argmax tokens the same"
            )
        blocks: list[Block] = [Heading(f"{self.model} as ONNX"), Facts(tuple(facts.items()))]
        for route in self.fallen_back:
            blocks.append(Text(f"{route.layer}: {route.route}, since {route.reason}"))
        return tuple(blocks)


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
        self.offsets: dict[str, int] = {}  # in the file of weights
        is_external = (
            sum(value.const_value.nbytes for value in self.values.values()) > external_bytes
        )
        end = 0
        for key, value in self.values.items():
            absent = absent_weight(value)
            if absent is not None:
                self.absent.setdefault(absent.source, {})[key] = absent
            nbytes = value.const_value.nbytes
            if is_external and nbytes > INLINE_BYTES:
                self.offsets[key] = end
                end += nbytes
        if is_external:
            with (folder / WEIGHTS).open("wb") as file:
                file.truncate(end)
                for key, offset in self.offsets.items():
                    if absent_weight(self.values[key]) is None:
                        put(self.values[key].const_value.tobytes(), file.fileno(), offset)

    def put(self, source: str, value: Tensor) -> None:
        """Take a tensor of the model, of the shape and dtype that was traced."""
        import onnx_ir

        for key, absent in self.absent[source].items():
            content = value.detach()
            if absent.order is not None:
                content = content.permute(absent.order)
            content = content.contiguous()
            traced = self.values[key].const_value
            assert tuple(content.shape) == tuple(traced.shape), source
            assert content.nbytes == traced.nbytes, source
            if key in self.offsets:
                raw = content.reshape(-1).view(torch.uint8).numpy().data
                with (self.folder / WEIGHTS).open("r+b") as file:
                    put(raw, file.fileno(), self.offsets[key])
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


def write_export(
    folder: Path, out: Path, options: ExportOptions, progress: Progress
) -> ExportSummary:
    """Export the checkpoint in `folder` to the new folder `out`.

    Configs, tokenizer and record are without times and folders, so that equal runs give equal
    files. Raises `CompressionError` for a graph that computes something else."""
    out = out.absolute()
    opened = open_model(locate(str(folder)), DTYPES[options.dtype], "cpu")
    check_carried(opened.source.folder)
    empty = opened.partial.empty.values()
    check_space(out, sum(value.numel() * value.element_size() for value in empty))
    scheme = SCHEMES.get(options.quantize)
    graph, routes, reference, original = write_graph(opened, out, scheme, options, progress)
    mapped = options.stream
    if mapped is None:
        mapped = not fits_whole(opened.source, "float32", "cpu")
    exported = Graph(out / GRAPH, mapped)
    changes = []
    bounds = EXACT
    if options.dtype == "fp16":
        changes.append("weights rounded to float16")
        bounds = HALF
    if scheme is not None:
        changes.append(f"experts rounded to {scheme.describe()}")
    label = f"{STOCK} with {' and '.join(changes)}" if changes else STOCK
    logits = exported.answers(reference.cases, progress)
    program = graph.program.graph
    summary = ExportSummary(
        folder=out,
        model=reference.model,
        **_sizes(out),
        verification=compare(logits, reference, bounds, label, exported.how),
        rounding=None if original is None else rounding_cost(original, reference),
        nodes=sum(1 for _ in program.all_nodes()),
        inputs=tuple(value.name for value in program.inputs),
        outputs=tuple(value.name for value in program.outputs),
        routes=routes,
    )
    files = carried_files(opened.source.folder)
    files.pop(MODELOPT, None)  # as config.json says nothing of quantisation any more
    record = {
        "tool": TOOL,
        "versions": versions(PACKAGES),
        "source": opened.source.label,
        "files": sorted(files),
        "options": options.model_dump(exclude=UNRECORDED),
        **{name: value for name, value in asdict(summary).items() if name not in OF_FILES},
    }
    files["config.json"] = json_bytes(plain_config(without_code(opened.checkpoint.raw_config)))
    files[RECORD] = json_bytes(record)
    compression = opened.source.folder / COMPRESSION
    if compression.is_file():
        files[COMPRESSION] = compression
    for name, content in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    return summary


def write_graph(
    opened: OpenModel,
    folder: Path,
    scheme: Scheme | None,
    options: ExportOptions,
    progress: Progress,
) -> tuple[GraphFile, tuple[LayerRoute, ...], Reference, Reference | None]:
    """Trace the model, observe the stock one, and write each layer's weights while its cases pass
    them.

    Returns the graph, how each MoE layer is written, the stock model's logits (with rounded weights
    where they are rounded), and those before rounding if so. At most two layers, the graph and the
    embedding are in memory."""
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
    folder.mkdir()
    graph = GraphFile(program, folder, options.external_bytes)
    progress.advance("graph")
    by_decoder_layer: dict[str, list[str]] = {}
    for source in graph.absent:
        decoder_layer = decoder_layer_of(source, opened.architecture.decoder_layers)
        by_decoder_layer.setdefault(decoder_layer, []).append(source)
    nodes = {route.layer for route in routes if route.reason is None}

    def shown(partial: PartialModel, decoder_layer: str) -> None:
        tensors = dict[str, Tensor]()  # of MoE nodes, which are not those of the model
        for name, experts in experts_modules(partial.model):
            if not name.startswith(f"{decoder_layer}."):
                continue
            if scheme is not None:
                round_experts(experts, scheme)
            if name in nodes:
                of_node = moe_node(experts, scheme)[1]
                tensors |= {f"{name}.{key}": value for key, value in of_node.items()}
            vars(experts).pop(SCALES, None)
        for source in by_decoder_layer.get(decoder_layer, ()):
            if source not in tensors:
                tensors[source] = partial.model.get_parameter_or_buffer(source)
            graph.put(source, tensors.pop(source))
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


def summary_of(out: Path) -> ExportSummary:
    """Return what `export` returned, from the record that it left in `out`."""
    record = read_object(out / RECORD)
    values = {"folder": out, **_sizes(out)}
    for name, kind in get_type_hints(ExportSummary).items():
        if name not in OF_FILES:
            values[name] = value_as(record.get(name), kind, f"{out / RECORD}: {name}")
    return ExportSummary(**values)


def _sizes(folder: Path) -> Json:
    files = [path for path in (folder / GRAPH, folder / WEIGHTS) if path.exists()]
    return {"nbytes": sum(path.stat().st_size for path in files), "external": len(files) > 1}


def plain_config(raw: Json) -> Json:
    """A config, and the configs inside it, without how weights are quantised: the graph's are
    not."""
    config = {
        name: plain_config(value) if isinstance(value, dict) else value
        for name, value in raw.items()
        if name != "quantization_config"
    }
    return config
