"""docs/architectures.md: what works, found out by compressing a tiny model of every family, and what is refused."""

import inspect
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

import compressor
from compressor.attribution.measure import attribute
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.model.architecture import discover, experts_modules
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.steps.configuration import HEADS
from compressor.steps.split.shape import split_shape
from exporters import onnx
from scripts.benchmarks import frame
from tests.support import zoo

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
COLUMNS = ("Family", "Model class", "Supported", "Routing", "Attribution", "ONNX", "Split", "Notes")
EXACT = "exact"
MARK = "@use_experts_implementation"
EXPERTS_CLASS = re.compile(r"^class \w*(?:Experts|MoE|Moe|SparseMLP)\(", re.MULTILINE)
RUNTIME_FAULT = re.compile(r"\[ONNXRuntimeError\].*?running (\w+) node\..*?Status Message: (?:\S+:\d+ .*?\) )?")
# Where defaults do not build.
SETTINGS: dict[str, dict[str, Any]] = {"dbrx": {"attn_config": {"rope_theta": 10000.0}}}
# As real sparse attention has; the tests' 2 score many tokens exactly 0, and ties are broken anyhow.
INDEX_HEADS = 32
NO_CLASS = "transformers has no model class of this family that could be opened"


def source_of(module: Any) -> str:
    """Return the source of a module's class, and of the functions of its file that it calls, without comments."""
    text = inspect.getsource(type(module))
    home = sys.modules[type(module).__module__]
    called = [getattr(home, name, None) for name in sorted(set(re.findall(r"\b(\w+)\(", text)))]
    parts = [text, *(inspect.getsource(entry) for entry in called if inspect.isfunction(entry))]
    return re.sub(r"#.*", "", "".join(parts))


def routing_cell(opened: list[OpenModel]) -> str:
    """Return how the router scores experts, read in the source of the router or its block, and by what it chooses."""
    layer, kinds = opened[0].architecture.layers[-1], []
    for name in (layer.router, layer.block):
        source = source_of(opened[0].partial.model.get_submodule(name))
        found = [word for word in ("sigmoid", "softmax") if re.search(rf"\b{word}\(", source)]
        if "scoring_func" in source or len(found) == 2:
            kinds.append("top-k, score by config")
        elif found:
            kinds.append(f"{found[0]} top-k")
    kinds = [*kinds, "top-k"][:1]
    layers = [layer for model in opened for layer in model.architecture.layers]
    if any(layer.routing_groups > 1 for layer in layers):
        kinds.append("in groups where the config has any")
    if any(layer.tables for layer in layers):
        kinds.append("some layers by token id")
    return ", ".join(kinds)


def notes_cell(opened: OpenModel) -> str:
    """Return how experts are stored, and what an MoE block or the model holds beside the routed experts."""
    architecture, model = opened.architecture, opened.partial.model
    notes = [f"`{architecture.count_field}`"]
    kinds = {role.kind for role in opened.layout.roles.values()}
    if opened.layout.regular:
        notes.append("stored one by one" if "expert" in kinds else "stored fused")
    else:
        notes.append("stored with the vision experts, so written through the model")
    moe_layers = {layer.decoder_layer for layer in architecture.layers}
    names = {name for name, _ in experts_modules(model)}
    if names - {layer.name for layer in architecture.layers}:
        notes.append("two stacks of layers share their experts")
    elif len(moe_layers) < len(architecture.decoder_layers):
        notes.append("dense layers")
    if any("vision" in layer.name for layer in architecture.layers):
        notes.append("vision experts too")
    if architecture.family.removesuffix("_text") in zoo.LOOPED:
        notes.append("its layers run several times, so only what needs no calibration")
    leaves, extra = set[str](), 0
    for layer in architecture.layers:
        for tensor in layer.tensors:
            if tensor.key.startswith(f"{layer.name}."):
                continue
            extra = max(extra, tensor.extra)
            if "weight" not in tensor.key or opened.partial.empty[tensor.key].dim() == 1:
                leaves.add(f"`{tensor.key.rpartition('.')[2]}`")
    if leaves:
        notes.append(f"beside the router's weight: {', '.join(sorted(leaves))}")
    modules = [name.rpartition(".")[2] for name, _ in model.named_modules()]
    shared = any("shared" in name and re.search("expert|mlp", name) for name in modules)
    if extra:
        rows = f"{extra} more router row{'s' if extra > 1 else ''}"
        notes.append(f"{rows}, {'for shared experts' if shared else 'to skip'}")
    if shared:
        notes.append("shared experts")
    if any(layer.tables for layer in architecture.layers):
        notes.append("tables of expert ids are rewritten")
    fields = vars(opened.config) | vars(opened.config.get_text_config())
    heads = [f"`{key}`" for key in sorted(fields) if HEADS.fullmatch(key) and isinstance(fields[key], int)]
    if heads:
        notes.append(f"its config announces a head by {', '.join(heads)}")
    return "; ".join(notes)


def attribution_cell(opened: OpenModel) -> str:
    """Return how exact the decomposition of a family's routers is, or the reason why there is none."""
    calibration = Calibration((zoo.tokens(opened.partial.model),), {})
    try:
        found = attribute(opened, calibration, Silent())
    except CompressionError as error:
        return "no: " + re.sub(r"^\w+ cannot be attributed: ", "", str(error)).partition(";")[0]
    return bound(max(entry.unexplained for entry in found.receivers))


def bound(rounding: float) -> str:
    """Return a power of ten at least twice what rounding came to here, and at least 1e-6, so that it holds elsewhere."""
    return next(f"under 1e-{digits}" for digits in range(6, -1, -1) if 2 * rounding <= 10.0**-digits)


def folder_for_graph(name: str, folder: Path, scratch: Path) -> Path:
    """Return the model whose graph is made: the one in `folder`, or one with more index heads."""
    model = zoo.build(name)
    text = model.config.get_text_config()
    if getattr(text, "index_n_heads", INDEX_HEADS) >= INDEX_HEADS:
        return folder
    text.index_n_heads = INDEX_HEADS
    wider: Any = type(model)(model.config)
    zoo.randomise(wider.eval(), torch.Generator().manual_seed(0))
    try:
        zoo.logits(wider, zoo.tokens(wider))
        wider.save_pretrained(scratch)
    except RuntimeError:  # so many do not go with its other sizes
        return folder
    return scratch


def onnx_cell(folder: Path, out: Path) -> str:
    """Return how far the exported graph is from the stock model, without its cache if need be, or why there is none."""
    for past in (True, False):
        try:
            found = onnx.export(folder, out, onnx.ExportOptions(past=past))
        except CompressionError as error:
            reason = RUNTIME_FAULT.sub(r"\1: ", str(error).removesuffix("; nothing was written"))
            shutil.rmtree(out, ignore_errors=True)
            continue
        parts = [bound(found.verification.largest_difference)]
        if not past:
            parts.append("no cache")
        parts += sorted({route.route for route in found.fallen_back})
        modules = open_model(locate(str(folder))).partial.model.modules()
        rotary = [module for module in modules if hasattr(module, "rope_type")]
        # Rotary embeddings of a family's own choose between short and long texts in Python.
        if any(re.search(r"if seq_len\b", source_of(module)) for module in rotary):
            parts.append("not with `longrope`")
        return ", ".join(parts)
    return f"no: {reason}"


def split_cell(opened: Mapping[str, OpenModel]) -> str:
    """Return whether sub-experts compute the same, or why not; variants that differ in that are named."""
    cells = {}
    for case, model in opened.items():
        cells[case] = EXACT
        try:
            split_shape(model.architecture, 2)
        except CompressionError as error:
            message = re.sub(r"^\w+ cannot be split( exactly)?: ", "", str(error))
            before, _, reason = message.partition(" of the largest, for ")
            cells[case] = f"no: {reason or re.sub(r' by [0-9.e-]+ of the largest', '', before)}"
    first, *_ = cells.values()
    differing = [case for case, cell in cells.items() if (cell == EXACT) != (first == EXACT)]
    kind = EXACT if first != EXACT else "not"
    return first + (f" ({kind}: {', '.join(differing)})" if differing else "")


def supported_row(name: str) -> str:
    """Compress a family's tiny model, reload it, and describe it; a failure is the row's reason."""
    variants = [variant for variant in zoo.VARIANTS if variant.split("-")[0] == name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for case in (name, *variants):
            zoo.save(case, folder / case)
        model_class = zoo.family(name).model_class
        try:
            compressor.compress(str(folder / name), folder / "out", strategy="model-centric", experts=4)
            reloaded = zoo.reload(name, folder / "out")
            if not zoo.logits(reloaded, zoo.tokens(reloaded)).isfinite().all():
                raise CompressionError("the reloaded model's logits are not finite")
        except CompressionError as error:
            return frame.row(name, model_class, f"no: {error}", *[""] * 5)
        opened = {case: open_model(locate(str(folder / case))) for case in (name, *variants)}
        first = opened[name]
        graph = onnx_cell(folder_for_graph(name, folder / name, folder / "heads"), folder / "graph")
        cells = routing_cell([*opened.values()]), attribution_cell(first), graph, split_cell(opened), notes_cell(first)
        return frame.row(name, model_class, "yes", *cells)


def refused_families() -> list[str]:
    """Return folders of transformers' models that define experts, but not with the uniform interface."""
    models = Path(transformers.__file__).parent / "models"
    found = []
    for folder in sorted(models.iterdir()):
        source = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("modeling_*.py")))
        if EXPERTS_CLASS.search(source) and MARK not in source and folder.name not in zoo.FAMILIES:
            found.append(folder.name)
    return found


def refused_row(family: str) -> str:
    """Return the row with what `discover` says of a family's default config, built on the meta device."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    mappings = (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_BACKBONE_MAPPING,
    )  # fmt: skip
    classes = [entry for entry in CONFIG_MAPPING.values() if entry.__module__.split(".")[2] == family]
    pairs = [(kind, mapping[kind].__name__) for kind, mapping in product(classes, mappings) if kind in mapping]
    if not pairs:
        return frame.row(family, "none", "no", *[""] * 4, NO_CLASS)
    config_class, name = pairs[0]
    try:
        config = config_class(**SETTINGS.get(family, {}))
        config.architectures = [name]
        discover(config)
    except CompressionError as error:
        return frame.row(family, name, "no", *[""] * 4, error)
    raise RuntimeError(f"{family} is not refused: give it a place in tests/support/zoo_configs.py")


def page_with(families: Sequence[str]) -> str:
    """Return the page with the rows of these families made anew, or all of them."""
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    supported, refused = sorted(zoo.FAMILIES), refused_families()
    page = PAGE.read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    for family in families or [*supported, *refused]:
        print(family, file=sys.stderr)
        rows[family] = supported_row(family) if family in zoo.FAMILIES else refused_row(family)
    head = frame.table(COLUMNS)
    header = re.sub(r"\d+(?= families)", str(len(supported)), page.partition("## Supported\n")[0], count=1)
    header = re.sub(r"(?<=transformers )\d[\d.]*\d", transformers.__version__, header)
    lines = [f"{header}## Supported\n", head, *(rows[name] for name in supported), ""]
    lines += [f"Their variants in the tests: {', '.join(sorted(zoo.VARIANTS))}.\n"]
    return "\n".join([*lines, "## Refused\n", head, *(rows[name] for name in refused), ""])
