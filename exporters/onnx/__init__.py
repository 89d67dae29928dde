"""A checkpoint as an ONNX graph for ONNX Runtime, written only when it has been shown to compute the same.

The graph is traced without its large weights, and those go from the source into their file one layer at a time, while
the stock model answers everything that the graph will be asked. Then ONNX Runtime is asked: the whole graph where it
fits into memory, and otherwise layer by layer.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.evaluation.evaluate import fits
from compressor.files import TOOL, new_folder
from compressor.model.opened import OpenModel, open_model
from compressor.model.verification import check_carried
from compressor.progress import Progress, Silent
from compressor.records import read_object, value_as
from compressor.run_record import COMPRESSION, versions
from compressor.steps.job import carried_files
from compressor.steps.workdir import check_space, check_target
from exporters.onnx.moe import FALLBACKS, LayerRoute
from exporters.onnx.quantise import SCHEMES, Scheme
from exporters.onnx.reference import TOKENS
from exporters.onnx.verify import EXACT, HALF, STOCK, Graph, RoundingCost, Verification, compare, rounding_cost
from exporters.onnx.weights import GRAPH, WEIGHTS, write_graph

DTYPES = {"fp32": "float32", "fp16": "float16"}
FORMATS = {"none": None, **SCHEMES}  # of the experts' weights
OPSETS = range(18, 24)
EXTERNAL_BYTES = 64 * 2**20  # above this the weights lie in a file of their own; a graph file ends at 2 GB
RECORD = "onnx_export.json"
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "onnx-ir", "torch", "transformers", "moe-compressor")
UNRECORDED = ("overwrite", "external_bytes", "stream")  # options that change nothing of the graph
RECORDED = ("model", "nodes", "inputs", "outputs", "routes", "verification", "rounding")  # of the summary


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
    stream: bool | None = None  # whether to verify layer by layer; None: where the model does not fit into memory

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

    @property
    def scheme(self) -> Scheme | None:
        return FORMATS[self.quantize]


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
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise CompressionError(f"ONNX export needs the package {missing[0]}; pip install 'moe-compressor[onnx]'")


def export(
    folder: Path, out: Path, options: ExportOptions | None = None, progress: Progress | None = None
) -> ExportSummary:
    """Export the checkpoint in `folder` to `out`: graph, weights, configs, tokenizer, and a record of the verification.

    Raises `CompressionError` and leaves nothing if it fails.
    """
    options, progress = options or ExportOptions(), progress or Silent()
    require_packages()
    out = Path(out).absolute()
    check_target(out, options.overwrite)
    opened = open_model(locate(str(folder)), DTYPES[options.dtype], "cpu")
    check_carried(opened.source.folder)
    check_space(out, sum(value.numel() * value.element_size() for value in opened.partial.empty.values()))
    with new_folder(out, partial(check_target, out, options.overwrite)) as content:
        graph, routes, reference, original = write_graph(opened, content, options, progress)
        layered = not fits(opened.source, "float32", "cpu") if options.stream is None else options.stream
        owners = {key: recipe.source for key, recipe in graph.recipes.items()}
        exported = Graph(content / GRAPH, owners, opened.architecture.units if layered else ())
        changes = [f"experts rounded to {options.scheme.describe()}"] if options.scheme is not None else []
        if options.dtype == "fp16":
            changes.insert(0, "weights rounded to float16")
        label = f"{STOCK} with {' and '.join(changes)}" if changes else STOCK
        bounds = HALF if options.dtype == "fp16" else EXACT
        program = graph.program.graph
        summary = ExportSummary(
            folder=out,
            model=reference.model,
            **_sizes(content),
            verification=compare(exported.answers(reference.cases, progress), reference, bounds, label, exported.how),
            rounding=None if original is None else rounding_cost(original, reference),
            nodes=sum(1 for _ in program.all_nodes()),
            inputs=tuple(value.name for value in program.inputs),
            outputs=tuple(value.name for value in program.outputs),
            routes=routes,
        )
        _write_files(opened, content, options, summary)
    return summary


def read_summary(out: Path) -> ExportSummary:
    """Return what `export` returned, from the record that it left in `out`."""
    record, kinds = read_object(out / RECORD), get_type_hints(ExportSummary)
    recorded = {name: value_as(record[name], kinds[name], name) for name in RECORDED}
    return ExportSummary(folder=out, **_sizes(out), **recorded)


def _sizes(folder: Path) -> dict[str, Any]:
    files = [path for path in (folder / GRAPH, folder / WEIGHTS) if path.exists()]
    return {"nbytes": sum(path.stat().st_size for path in files), "external": len(files) > 1}


def plain_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config, and the configs inside it, without how weights are quantised: the graph's are not."""
    kept = {name: value for name, value in raw.items() if name != "quantization_config"}
    return {name: plain_config(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _write_files(opened: OpenModel, content: Path, options: ExportOptions, summary: ExportSummary) -> None:
    """Write configs, tokenizer and the record, without times and folders, so that equal runs give equal records."""
    files = carried_files(opened.source.folder)
    carried = sorted(files)
    compression = opened.source.folder / COMPRESSION
    if compression.is_file():
        files[COMPRESSION] = compression
    for name, source in files.items():
        (content / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, content / name)
    result = asdict(summary)
    record = {
        "tool": TOOL,
        "versions": versions(PACKAGES),
        "source": opened.source.label,
        "files": carried,
        "options": {name: value for name, value in asdict(options).items() if name not in UNRECORDED},
        **{name: result[name] for name in RECORDED},
    }
    for name, values in (("config.json", plain_config(opened.checkpoint.raw_config)), (RECORD, record)):
        (content / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
