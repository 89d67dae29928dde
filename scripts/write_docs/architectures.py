"""docs/architectures.md: what works, found out by compressing a tiny model of every family, and what is refused."""

import inspect
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import compressor
from compressor.attribution.measure import attribute
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.model.architecture import Architecture, discover, experts_modules
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.steps.configuration import HEADS
from compressor.steps.split.shape import split_shape
from exporters import onnx
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
HEADER = """# Architectures

{supported} families of transformers {version} are supported: all that have its uniform experts interface, and
step3p7, which lacks its flags alone. Other Mixture-of-Experts families are refused with the message in the last table.
So is a model with two MoE parts that count their experts separately, such as the whole
`Qwen3OmniMoeForConditionalGeneration` (its thinker alone is supported).

`python -m scripts.write_docs architectures` writes this page: it merges eight experts of a tiny random model of each family into
four and reloads the result with stock transformers {version}. `tests/test_architectures.py` compares dropping and
merging with surgery in memory, weight by weight.

- **Attribution**: the largest difference between the sum of sub-scores and a router's logits, relative to the largest
  logit, in float32; or why the family can't be attributed.
- **ONNX**: the largest difference of a logit between ONNX Runtime and the stock model, with the cache unless noted, and
  what replaces the MoE node where a layer needs more; or why the family can't be exported. Rotary embeddings of type
  `longrope` are exported for short and long texts unless noted; those of type `dynamic` are refused.
- **Split**: whether a split leaves the function of the family's stock MoE block unchanged, or why not; variants that
  differ are in parentheses.

Differences are rounding errors and vary by processor, so each is given as a power of ten of at least twice the value
found. Models with an indexer were exported with {heads} index heads, because with 2 many tokens tie at a score of 0.

DeepSeek-MoE-16B (`deepseek`) has no class in transformers, and can't load as `deepseek_v2`, whose attention is latent.
As `qwen2_moe` it computes the same: `python examples/deepseek_moe.py MODEL FOLDER` writes that checkpoint.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the page."""

    family: str
    model_class: str
    supported: str
    routing: str
    attribution: str
    onnx: str
    split: str
    notes: str

    def text(self) -> str:
        """The line in Markdown."""
        described = (self.routing, self.attribution, self.onnx, self.split, self.notes)
        cells = (self.family, self.model_class, self.supported, *described)
        return f"| {' | '.join(cells)} |"


def _source(module: Any) -> str:
    """The source of a module's class, and of the functions of its file that it calls, without comments."""
    text = inspect.getsource(type(module))
    home = sys.modules[type(module).__module__]
    called = [getattr(home, name, None) for name in sorted(set(re.findall(r"\b(\w+)\(", text)))]
    parts = [text, *(inspect.getsource(entry) for entry in called if inspect.isfunction(entry))]
    return re.sub(r"#.*", "", "".join(parts))


def _scores(model: Any, architecture: Architecture) -> str:
    """How the router scores experts, read in the source of the router or its block."""
    layer = architecture.layers[-1]
    for name in (layer.router, layer.block):
        source = _source(model.get_submodule(name))
        found = [word for word in ("sigmoid", "softmax") if re.search(rf"\b{word}\(", source)]
        if "scoring_func" in source or len(found) == 2:
            return "top-k, score by config"
        if found:
            return f"{found[0]} top-k"
    return "top-k"


def _routing(opened: list[OpenModel]) -> str:
    layers = [layer for model in opened for layer in model.architecture.layers]
    kinds = [_scores(opened[0].partial.model, opened[0].architecture)]
    if any(layer.routing_groups > 1 for layer in layers):
        kinds.append("in groups where the config has any")
    if any(layer.tables for layer in layers):
        kinds.append("some layers by token id")
    return ", ".join(kinds)


def _beside(opened: OpenModel) -> Iterator[str]:
    """What an MoE block holds beside the routed experts."""
    architecture, model = opened.architecture, opened.partial.model
    leaves, extra = set[str](), 0
    for layer in architecture.layers:
        for tensor in layer.tensors:
            if tensor.key.startswith(f"{layer.name}."):
                continue
            extra = max(extra, tensor.extra)
            if "weight" not in tensor.key or opened.partial.empty[tensor.key].dim() == 1:
                leaves.add(f"`{tensor.key.rpartition('.')[2]}`")
    if leaves:
        yield f"beside the router's weight: {', '.join(sorted(leaves))}"
    names = [name.rpartition(".")[2] for name, _ in model.named_modules()]
    shared = any("shared" in name and re.search("expert|mlp", name) for name in names)
    if extra:
        yield f"{extra} more router row{'s' if extra > 1 else ''}, {'for shared experts' if shared else 'to skip'}"
    if shared:
        yield "shared experts"
    if any(layer.tables for layer in architecture.layers):
        yield "tables of expert ids are rewritten"


def _notes(opened: OpenModel) -> str:
    architecture = opened.architecture
    notes = [f"`{architecture.count_field}`"]
    kinds = {role.kind for role in opened.layout.roles.values()}
    if opened.layout.regular:
        notes.append("stored one by one" if "expert" in kinds else "stored fused")
    else:
        notes.append("stored with the vision experts, so written through the model")
    moe_layers = {layer.decoder_layer for layer in architecture.layers}
    names = {name for name, _ in experts_modules(opened.partial.model)}
    if names - {layer.name for layer in architecture.layers}:
        notes.append("two stacks of layers share their experts")
    elif len(moe_layers) < len(architecture.decoder_layers):
        notes.append("dense layers")
    if any("vision" in layer.name for layer in architecture.layers):
        notes.append("vision experts too")
    if architecture.family.removesuffix("_text") in zoo.LOOPED:
        notes.append("its layers run several times, so only what needs no calibration")
    notes += _beside(opened)
    fields = vars(opened.config) | vars(opened.config.get_text_config())
    heads = [key for key in sorted(fields) if HEADS.fullmatch(key) and isinstance(fields[key], int)]
    if heads:
        notes.append(f"its config announces a head by {', '.join(f'`{key}`' for key in heads)}")
    return "; ".join(notes)


def _attribution(opened: OpenModel) -> str:
    """How exact the decomposition of a family's routers is, or the reason why there is none."""
    calibration = Calibration((zoo.tokens(opened.partial.model),), {})
    try:
        found = attribute(opened, calibration, Silent())
    except CompressionError as error:
        return "no: " + re.sub(r"^\w+ cannot be attributed: ", "", str(error)).partition(";")[0]
    return bound(max(entry.unexplained for entry in found.receivers))


def bound(rounding: float) -> str:
    """A power of ten at least twice what rounding came to here, and no less than 1e-6, so that it holds elsewhere."""
    return next(f"under 1e-{digits}" for digits in range(6, -1, -1) if 2 * rounding <= 10.0**-digits)


def _for_graph(name: str, place: Path, scratch: Path) -> Path:
    """The model whose graph is made: the one at `place`, or one with more index heads."""
    model = zoo.build(name)
    text = model.config.get_text_config()
    if getattr(text, "index_n_heads", INDEX_HEADS) >= INDEX_HEADS:
        return place
    text.index_n_heads = INDEX_HEADS
    wider: Any = type(model)(model.config)
    zoo.randomise(wider.eval(), torch.Generator().manual_seed(0))
    try:
        zoo.logits(wider, zoo.tokens(wider))
        wider.save_pretrained(scratch)
    except RuntimeError:  # so many do not go with its other sizes
        return place
    return scratch


def _branches_by_length(model: Any) -> bool:
    """Whether rotary embeddings of a family's own choose between short and long texts in Python."""
    rotary = [module for module in model.modules() if hasattr(module, "rope_type")]
    return any(re.search(r"if seq_len\b", _source(module)) for module in rotary)


def _onnx(place: Path, out: Path) -> str:
    """How far the exported graph is from the stock model, without its cache if need be, or why there is none."""
    for past in (True, False):
        try:
            found = onnx.export(place, out, onnx.ExportOptions(past=past))
        except CompressionError as error:
            reason = RUNTIME_FAULT.sub(r"\1: ", str(error).removesuffix("; nothing was written"))
            shutil.rmtree(out, ignore_errors=True)
            continue
        others = sorted({route.route for route in found.fallen_back})
        parts = [bound(found.verification.largest_difference), *others]
        if not past:
            parts.insert(1, "no cache")
        if _branches_by_length(open_model(locate(str(place))).partial.model):
            parts.append("not with `longrope`")
        return ", ".join(parts)
    return f"no: {reason}"


def _split(architectures: Mapping[str, Architecture]) -> str:
    """Whether experts in two parts compute the same, or why they do not; variants that differ in that are named."""
    (_, own), *others = found = [(case, _split_one(each)) for case, each in architectures.items()]
    differing = [case for case, told in others if (told == EXACT) != (own == EXACT)]
    kind = EXACT if own != EXACT else "not"
    return own + (f" ({kind}: {', '.join(differing)})" if differing and len(found) > 1 else "")


def _split_one(architecture: Architecture) -> str:
    try:
        split_shape(architecture, 2)
    except CompressionError as error:
        why = re.sub(r"^\w+ cannot be split( exactly)?: ", "", str(error)).partition(" of the largest, for ")
        return f"no: {why[2] or re.sub(r' by [0-9.e-]+ of the largest', '', why[0])}"
    return EXACT


def _variants(name: str) -> list[str]:
    return [variant for variant in zoo.VARIANTS if variant.split("-")[0] == name]


def supported_row(name: str) -> Row:
    """Compress a family's tiny model, reload it, and describe it; a failure is the row's reason."""
    with tempfile.TemporaryDirectory() as folder:
        places = {case: Path(folder) / case for case in (name, *_variants(name))}
        for case, place in places.items():
            zoo.save(case, place)
        model_class = zoo.family(name).model_class
        try:
            compressor.compress(str(places[name]), Path(folder) / "out", strategy="model-centric", experts=4)
            reloaded = zoo.reload(name, Path(folder) / "out")
            if not zoo.logits(reloaded, zoo.tokens(reloaded)).isfinite().all():
                raise CompressionError("the reloaded model's logits are not finite")
        except CompressionError as error:
            return Row(name, model_class, f"no: {error}", "", "", "", "", "")
        opened = [open_model(locate(str(place), None)) for place in places.values()]
        return Row(
            name, model_class, "yes", _routing(opened), _attribution(opened[0]),
            _onnx(_for_graph(name, places[name], Path(folder) / "heads"), Path(folder) / "graph"),
            _split({case: model.architecture for case, model in zip(places, opened, strict=True)}), _notes(opened[0]),
        )  # fmt: skip


def refused_families() -> list[str]:
    """Folders of transformers' models that define experts, but not with the uniform interface."""
    models = Path(transformers.__file__).parent / "models"
    found = []
    for folder in sorted(models.iterdir()):
        source = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("modeling_*.py")))
        if EXPERTS_CLASS.search(source) and MARK not in source and folder.name not in zoo.FAMILIES:
            found.append(folder.name)
    return found


def _stock_config(family: str) -> tuple[Any, str]:
    """A default config of a family and the name of its model class."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    mappings = (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_BACKBONE_MAPPING,
    )  # fmt: skip
    for config_class in CONFIG_MAPPING.values():
        if config_class.__module__.split(".")[2] == family:
            for mapping in mappings:
                if config_class in mapping:
                    return config_class(**SETTINGS.get(family, {})), mapping[config_class].__name__
    raise CompressionError("transformers has no model class of this family that could be opened")


def refused_row(family: str) -> Row:
    """What `discover` says of a family's default config, built on the meta device."""
    name = "none"
    try:
        config, name = _stock_config(family)
        config.architectures = [name]
        discover(config)
    except CompressionError as error:
        return Row(family, name, "no", "", "", "", "", str(error))
    raise RuntimeError(f"{family} is not refused: give it a place in tests/support/zoo_configs.py")


def page_with(families: Sequence[str]) -> str:
    """Return the page with the rows of these families made anew, or all of them."""
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    supported, refused = sorted(zoo.FAMILIES), refused_families()
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            rows[line.split("|")[1].strip()] = line
    for family in families or [*supported, *refused]:
        print(family, file=sys.stderr)
        row = supported_row(family) if family in zoo.FAMILIES else refused_row(family)
        rows[family] = row.text()
    facts = {"version": transformers.__version__, "heads": INDEX_HEADS}
    parts = [HEADER.format(**facts, supported=len(supported)), "## Supported\n"]
    head = f"| {' | '.join(COLUMNS)} |\n|{'|'.join('---' for _ in COLUMNS)}|"
    parts.append("\n".join([head, *(rows[name] for name in supported), ""]))
    parts.append(f"Their variants in the tests: {', '.join(sorted(zoo.VARIANTS))}.\n")
    parts += ["## Refused\n", "\n".join([head, *(rows[name] for name in refused), ""])]
    return "\n".join(parts)
