"""A checkpoint as an ONNX graph for ONNX Runtime, written only when it has been shown to compute the same.

The model is in memory once: the stock model answers everything that the graph will be asked, then its experts are
brought into the node's layout one module at a time, the graph is saved, the model goes, and ONNX Runtime is asked.
"""

import gc
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError, reason_of
from compressor.model.architecture import experts_modules
from compressor.model.carried import check_carried
from compressor.model.loading import PartialModel
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Progress, Silent
from compressor.records import read_as, read_object
from compressor.replaceable import TOOL
from compressor.run_record import COMPRESSION, versions
from compressor.surgery.job import carried_files
from exporters import safetensors as publishing
from exporters.onnx_experts import FALLBACKS, LayerRoute, use_nodes
from exporters.onnx_graph import export_graph, trace_inputs
from exporters.onnx_quantized_experts import FORMATS, RoundingCost, rounding_cost
from exporters.onnx_reference import TOKENS, Reference, observe
from exporters.onnx_verify import EXACT, HALF, STOCK, Verification, compare

GRAPH, WEIGHTS, RECORD = "model.onnx", "model.onnx.data", "onnx_export.json"
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "onnx-ir", "torch", "transformers", "moe-compressor")
RECORDED = ("model", "nodes", "inputs", "outputs", "routes", "verification", "rounding")  # of the summary
DTYPES = {"fp32": "float32", "fp16": "float16"}
OPSETS = range(18, 24)
EXTERNAL_BYTES = 64 * 2**20  # above this the weights lie in a file of their own; a graph file ends at 2 GB
INLINE_BYTES = 1024  # a tensor no larger than this stays in the graph, where optimisers can read it


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to make of a checkpoint."""

    opset: int = 20
    dtype: str = "fp32"
    quantize: str = "none"
    past: bool = True  # the cache as inputs and outputs
    overwrite: bool = False
    fallback: str = FALLBACKS[0]  # for layers that the MoE node cannot express
    external_bytes: int = EXTERNAL_BYTES
    tokens: int = TOKENS  # greedy tokens that are compared

    def __post_init__(self) -> None:
        for name, value, known in (
            ("--dtype", self.dtype, DTYPES),
            ("--quantize", self.quantize, FORMATS),
            ("the fallback", self.fallback, FALLBACKS),
        ):
            if value not in known:
                raise CompressionError(f"{name} {value!r} is not known; it is one of {', '.join(known)}")
        if self.opset not in OPSETS:
            raise CompressionError(f"--opset {self.opset} is not supported; give one from {OPSETS[0]} to {OPSETS[-1]}")


Options = ExportOptions  # under this name the registry finds an exporter's options


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What was written, and how well it agrees with the stock model."""

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


def require_packages() -> None:
    """Refuse to start where the optional packages are missing."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise CompressionError(
            f"ONNX export needs the package {missing[0]}; install the extra with pip install 'moe-compressor[onnx]'"
        )


def export(
    folder: Path, out: Path, options: ExportOptions | None = None, progress: Progress | None = None
) -> ExportSummary:
    """Export the checkpoint in `folder` to the folder `out`; raises `CompressionError` and leaves nothing if it fails.

    `out` holds the graph, its weights, the configs and tokenizer, and a record of the verification.
    """
    options, progress = options or ExportOptions(), progress or Silent()
    require_packages()
    out = Path(out).absolute()
    publishing.check_target(out, options.overwrite)
    opened = open_model(locate(str(folder)), DTYPES[options.dtype], "cpu")
    check_carried(opened.source.folder)
    publishing.check_space(out, sum(value.numel() * value.element_size() for value in opened.partial.empty.values()))
    with publishing.making(out, overwrite=options.overwrite) as work:
        content = work.content
        reference, original, made = _write_graph(opened, content, options, progress)
        progress.start("verifying", 1)
        bounds = HALF if options.dtype == "fp16" else EXACT
        verification = compare(content / GRAPH, reference, bounds, _label(options))
        progress.advance("logits and greedy tokens")
        files = [path for path in (content / GRAPH, content / WEIGHTS) if path.exists()]
        summary = ExportSummary(
            folder=out,
            model=reference.model,
            nbytes=sum(path.stat().st_size for path in files),
            external=len(files) > 1,
            verification=verification,
            rounding=None if original is None else rounding_cost(original, reference),
            **made,
        )
        _write_files(opened, content, options, summary)
    return summary


def read_summary(out: Path) -> ExportSummary:
    """What `export` said of its work, from the record that it left."""
    record, files = read_object(out / RECORD), [path for path in (out / GRAPH, out / WEIGHTS) if path.exists()]
    return ExportSummary(
        folder=out,
        model=record["model"],
        nbytes=sum(path.stat().st_size for path in files),
        external=len(files) > 1,
        nodes=record["nodes"],
        inputs=tuple(record["inputs"]),
        outputs=tuple(record["outputs"]),
        routes=tuple(read_as(LayerRoute, route) for route in record["routes"]),
        verification=read_as(Verification, record["verification"]),
        rounding=None if record["rounding"] is None else read_as(RoundingCost, record["rounding"]),
    )


def _label(options: ExportOptions) -> str:
    half = "weights rounded to float16" if options.dtype == "fp16" else ""
    changed = " and ".join(filter(None, (half, FORMATS[options.quantize].label)))
    return f"{STOCK} with {changed}" if changed else STOCK


def _load(partial: PartialModel, units: tuple[str, ...], progress: Progress) -> Any:
    """The whole stock model, filled one decoder layer at a time."""
    progress.start("loading", len(units) + 1)
    for unit in units:
        partial.load(partial.keys_under(unit))
        progress.advance(unit)
    partial.load(partial.empty)
    progress.advance("embeddings and head")
    return partial.model


def _write_graph(
    opened: OpenModel, content: Path, options: ExportOptions, progress: Progress
) -> tuple[Reference, Reference | None, dict[str, Any]]:
    """Load, observe, trace, save and check; the model is let go before the check.

    Returns what the stock model says, what it said before its experts were rounded, and the graph's facts.
    """
    import onnx
    import onnx_ir

    model, weight_format = _load(opened.partial, opened.architecture.units, progress), FORMATS[options.quantize]
    if options.past and not model.can_generate():
        raise CompressionError(f"{type(model).__name__} does not generate text, so it has no cache; pass --no-past")
    original = None
    if weight_format.rounded is not None:
        with _in_float32(model):
            original = observe(model, past=False, tokens=0)
        for _, experts in experts_modules(model):
            weight_format.rounded(experts)
    progress.start("observing the stock model", 1)
    with _in_float32(model):
        reference = observe(model, options.past, options.tokens)
    progress.advance("reference logits")
    progress.start("tracing", 2)
    inputs = trace_inputs(model, options.past)
    routes = use_nodes(model, options.fallback, options.dtype == "fp16", weight_format)
    progress.advance("experts")
    program = export_graph(model, inputs, options.opset)
    progress.advance("graph")
    graph = program.graph
    size = sum(value.const_value.nbytes for value in graph.initializers.values())
    external = WEIGHTS if size > options.external_bytes else None
    onnx_ir.save(program, content / GRAPH, external_data=external, size_threshold_bytes=INLINE_BYTES)
    facts = {
        "nodes": sum(1 for _ in graph.all_nodes()),
        "inputs": tuple(value.name for value in graph.inputs),
        "outputs": tuple(value.name for value in graph.outputs),
        "routes": routes,
    }
    del program, graph, inputs
    model.to_empty(device="meta")  # its weights go, whoever still holds the model
    gc.collect()
    try:
        onnx.checker.check_model(str(content / GRAPH), full_check=True)
    except Exception as error:  # a class for each kind of fault
        raise CompressionError(f"the exported graph is not sound ONNX: {reason_of(error)}") from error
    return reference, original, facts


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """The model with its rounded weights in float32, and afterwards in its own dtypes again, without a change."""
    own = {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}
    model.float()
    try:
        yield
    finally:
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.data = value.data.to(own[name])


def _write_files(opened: OpenModel, content: Path, options: ExportOptions, summary: ExportSummary) -> None:
    """Configs, tokenizer and the record. No timings and no folders, so that equal runs give equal records."""
    config = {name: value for name, value in opened.checkpoint.raw_config.items() if name != "quantization_config"}
    _write_json(content / "config.json", config)
    files = carried_files(opened.source.folder)
    carried = sorted(files)
    compression = opened.source.folder / COMPRESSION
    if compression.is_file():
        files[COMPRESSION] = compression
    for name, source in files.items():
        (content / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, content / name)
    asked, found = asdict(options), asdict(summary)
    record = {
        "tool": TOOL,
        "versions": versions(PACKAGES),
        "source": opened.source.label,
        "files": carried,
        "options": {name: value for name, value in asked.items() if name not in ("overwrite", "external_bytes")},
        **{name: found[name] for name in RECORDED},
    }
    _write_json(content / RECORD, record)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
