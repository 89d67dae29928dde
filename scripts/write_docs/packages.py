"""The packages of the product with their lines and imports, as docs/architecture.md shows them.

An arrow is an import, read from the source by `ast`, function-level and type-only ones included.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- packages: begin -->", "<!-- packages: end -->"
PRODUCT = ("compressor", "strategies", "exporters")
TOP = "compressor (the public names)"  # with api.py, which holds the functions
WORDS = "compressor (files in the root)"  # words that everybody uses: errors, files, memory, progress ...
OPTIONS = "steps (options.py of each)"

ORDER: Mapping[str, str] = {  # a package imports earlier ones only
    WORDS: "errors and the tokens kept out of them (`errors.py`), ties (`tolerance.py`), whole files, tensors "
    "of an interrupted run (`tensor_cache.py`), devices, memory, progress, entry points, processes, formatting",
    "document": "blocks of a report, a renderer for each medium, one kit for every picture",
    "checkpoint": "files on disk or on the Hub, read lazily",
    "model": "a checkpoint opened through transformers; one streamed pass, one layer of it in memory at a time",
    "data": "from sources of text to batches of tokens, in named parts; the demo's data",
    "statistics": "what is measured of MoE layers while text passes them",
    "divergence": "how far models are from their base on text: KL, loss, flips, and the acceptance rule",
    "answers": "models that answer prompts and lm-eval's tasks by one interface: in memory, streamed, a server, ONNX",
    "quality_gate": "statistics, conditions and verdict on what compression cost",
    "golden": "golden answers of a model, and whether something anywhere still computes them",
    "recipe": "steps, recipes and plans: what is to be done, as YAML and JSON",
    OPTIONS: "options and facts of the built-in steps, which load no torch",
    "steps": "what a step is; from a plan to smaller tensors, the output in the making",
    "steps.correct": "reconstruction: the remaining experts refitted layer by layer",
    "steps.split": "each expert as several narrower sub-experts that compute the same",
    "steps.prune": "which experts stay, merge or go; shared by strategies: `selection.py`, `partition.py`",
    "steps.routers": "router calibration: weights or biases moved toward the base",
    "steps.distill": "training toward the base on text",
    "steps.constants": "constants for experts that are left out, and how many each layer can spare",
    "steps.quantize": "weights in fewer bits: rounding to nearest or GPTQ, stored as compressed-tensors",
    "pipeline": "from a recipe to a finished output, step by step; the record of a run",
    "strategies": "one score each in `ranked.py`, others in files of their own; `compressor/plugins.py` is for plugins",
    "exporters": "ONNX: `onnx/moe.py` makes the MoE node, `trace.py` the graph, `verify.py` compares it; "
    "`keep_list.py`: plans as servers take them",
    "report": "one page to look at; many plans in one table",
    "hub": "pushing to the Hub, and the model card",
    TOP: "`compressor.compress` and so on, loaded when they are first used; `api.py` has the functions",
    "cli": "the command line: one file for a group of commands, listed in `main.py`",
    "attribution": "which senders steer the routers, and which experts are hubs (`hubs.py`)",
    "pathways": "C3PO: which experts a token is routed to, changed at test time",
    "comoe": "LoRA experts with a router beside linear layers",
    "gguf_files": "the files of llama.cpp: fewer experts, byte for byte",
}
# Found by entry points alone.
OPTIONAL = ("strategies", "exporters", "attribution", "pathways", "comoe", "gguf_files")
PLACE = {name: place for place, name in enumerate(ORDER)}


@dataclass(frozen=True, slots=True)
class Import:
    """One import of a module of the product by another, and where it stands."""

    file: Path
    line: int
    package: str
    imported: str  # the package


def sources() -> Iterator[Path]:
    """Yield every file of the product."""
    for name in PRODUCT:
        yield from sorted((ROOT / name).rglob("*.py"))


def package_of(module: str) -> str:
    """'compressor.quality_gate.verdict' -> 'quality_gate'; 'strategies.hope' -> 'strategies'."""
    head, *rest = module.split(".")
    if head != "compressor":
        return head
    if rest == ["plugins"]:
        return "strategies"
    if rest in ([], ["api"]):
        return TOP
    if rest[0] == "steps" and rest[-1] == "options":
        return OPTIONS
    if rest[0] == "steps" and len(rest) > 1 and (ROOT / "compressor" / "steps" / rest[1]).is_dir():
        return f"steps.{rest[1]}"
    if (ROOT / "compressor" / rest[0]).is_dir():
        return rest[0]
    return "cli" if rest[0] == "__main__" else WORDS


def module_of(file: Path) -> str:
    """'compressor/quality_gate/verdict.py' -> 'compressor.quality_gate.verdict'."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports; of `from package import name` the name too, if it is one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return []
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if (ROOT / f"{name.replace('.', '/')}.py").is_file() else node.module for name in inner]


def imports() -> list[Import]:
    """Return every import of one file of the product by another one."""
    found = []
    for file in sources():
        package, path = package_of(module_of(file)), file.relative_to(ROOT)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for name in dict.fromkeys(imported_modules(node)):
                if name.split(".")[0] in PRODUCT:
                    line = getattr(node, "lineno", 0)
                    found.append(Import(path, line, package, package_of(name)))
    return found


def arrows(found: Iterable[Import]) -> dict[str, list[str]]:
    """Return for each package the other ones that it imports, without the words that all use."""
    pairs = {(entry.package, entry.imported) for entry in found}
    others = [name for name in ORDER if name != WORDS]
    return {name: [o for o in others if o != name and (name, o) in pairs] for name in ORDER}


def table() -> str:
    """Return the packages, each after those that it imports, as Markdown."""
    files_of: dict[str, list[int]] = {name: [] for name in ORDER}
    for file in sources():
        lines = len(file.read_text(encoding="utf-8").splitlines())
        files_of[package_of(module_of(file))].append(lines)
    reached = arrows(imports())
    rows = ["| package | what lives there | lines | files | imports |", "|---|---|---|---|---|"]
    for name, meaning in ORDER.items():
        size = f"{sum(files_of[name]):,} | {len(files_of[name])}"
        rows.append(f"| {name} | {meaning} | {size} | {', '.join(reached[name]) or '-'} |")
    files = [lines for package in files_of.values() for lines in package]
    return "\n".join([*rows, f"| all | | {sum(files):,} | {len(files)} | |"])


def page() -> str:
    """Return docs/architecture.md with the table as it is now."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"
