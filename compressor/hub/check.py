"""Checks of a folder before it is pushed: its checkpoint or export is verified anew, and a required
gate has passed.

Also the files of it that belong on the Hub, none of them a link out of it, and those that an
earlier model left there."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from compressor.answers.models import identity
from compressor.checkpoint.reader import (
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    header_bytes,
    refuse_link,
    refuse_links,
    weights_head,
)
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.files import GOLDEN, RECEIPT, SUMS, TEMPLATES
from compressor.frozen import frozen
from compressor.hub.card import CARD
from compressor.model.constant_experts import SubstitutedCheckpoint, declared
from compressor.model.mtp import written_heads
from compressor.model.opened import open_substituted
from compressor.model.verification import verify_checkpoint
from compressor.pipeline.formats import exports_in, published_formats, wrap_exporter
from compressor.pipeline.outcome import read_plan
from compressor.pipeline.verify import verify_against_base, verify_digests
from compressor.quality_gate.report import read_gate
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.recipe import RECIPE
from compressor.records import read_object
from compressor.run_record import COMPRESSION

logger = logging.getLogger(__name__)

# configs, tokenizer, templates
BESIDE = (".bpe", ".codes", ".jinja", ".json", ".model", ".spm", ".tiktoken", ".txt")
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
PICTURES = (".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp")
EVAL_RESULTS = ".eval_results/moe-compressor.yaml"
# what says how the weights were made and judged
OF_THE_WEIGHTS = ("compression.json", RECIPE, "gate.json", GOLDEN, RECEIPT, EVAL_RESULTS)
SHOWN = re.compile(r"!\[[^\]]*\]\(\s*<?([^)\s>]+)|<img\b[^>]*?\bsrc=[\"']([^\"']+)", re.IGNORECASE)
WEIGHT_NAMES = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


@frozen
class VerifiedFolder:
    """A folder whose weights are what its configs say, and the files of it that belong on the
    Hub."""

    folder: Path
    export: str  # the exporter whose output it is; '' for a safetensors checkpoint
    files: Mapping[str, Path]  # by path in the repository
    left_out: tuple[str, ...]
    weights: frozenset[str]
    # of a file of tensors, by path in the repository: how many first bytes are none
    prefixes: Mapping[str, int]


def verify_folder(folder: Path) -> VerifiedFolder:
    """Check that a folder is a complete checkpoint or a verified export; raises `CompressionError`
    if not."""
    if not folder.is_dir():
        raise CompressionError(
            f"{folder} is not a folder; name the folder of a checkpoint or of an export"
        )
    has_weights = any((folder / name).exists() for name in (INDEX_NAME, SINGLE_NAME))
    exports = exports_in(folder)
    if not ("" in exports or has_weights or (folder / "config.json").exists()):
        raise CompressionError(
            f"{folder} is neither a safetensors checkpoint (config.json with {SINGLE_NAME} or "
            f"{INDEX_NAME}) nor an export that can be pushed, so nothing was; name the folder of "
            "one"
        )
    refuse_links(folder)
    for name, _ in published_formats():
        refuse_link(folder / name, folder)
    export_name, export = exports.pop("", ("", None))
    if export is not None:
        exports = {}
        with wrap_exporter(export_name):
            prefixes = dict(export.check_export(folder))
    else:
        # a checkpoint, one of ours by the experts that compression.json names
        experts = None
        heads = True
        if (folder / COMPRESSION).is_file():
            expert_plan = read_plan(folder).expert_plan
            # where no step decided on them, all stayed
            experts = expert_plan.experts if expert_plan.layers else None
            heads = expert_plan.mtp == "keep" or not expert_plan.layers
        # constants are all there, and the rest is a whole model
        if declared(read_object(folder / "config.json")):
            model = open_substituted(ModelSource.of(folder), device="cpu")
            assert isinstance(model.checkpoint, SubstitutedCheckpoint)
            model.checkpoint.substitutes(model.architecture.layers, model.partial.dtype, "cpu")
            checked: Checkpoint = model.checkpoint
        else:
            checked = verify_checkpoint(folder, experts, written_heads(folder) if heads else ())
        # the bytes of headers, and all of the index that names the files
        head = weights_head(folder, checked.raw_config)
        prefixes = {head.name: head.stat().st_size}
        for name in sorted({info.file for info in checked.tensors.values()}):
            prefixes[name] = header_bytes(folder / name)
    weights = frozenset(prefixes)
    files = belonging(folder, weights)
    for place, (exporter_name, exporter) in exports.items():
        inside = folder / place
        refuse_links(inside)
        with wrap_exporter(exporter_name):
            checked_files = dict(exporter.check_export(inside))
        for name, path in belonging(inside, checked_files).items():
            files[f"{place}/{name}"] = path
        for name, nbytes in checked_files.items():
            prefixes[f"{place}/{name}"] = nbytes
    # what lies openly in the folder and is not taken, sub-folders with a slash
    known = {name.split("/")[0] for name in files}
    left_out = [
        f"{path.name}/" if path.is_dir() else path.name
        for path in sorted(folder.iterdir())
        if path.name not in known and not path.name.startswith(".")
    ]
    return VerifiedFolder(folder, export_name, files, tuple(left_out), weights, prefixes)


def refuse_altered(folder: Path, base: Path | None) -> None:
    """Refuse an output that is not what its digests or, if its base is here, its record say; pass
    without digests."""
    result = verify_digests(folder)
    if result.passed and result.digests and base is not None:
        try:
            result = verify_against_base(folder, str(base), result)
        except CompressionError as error:
            logger.info("The output is not compared with its base: %s", error)
    if not result.passed:
        hint = f"restore it, or remove {SUMS} to push it as it is"
        raise CompressionError(f"{folder}: {result.faults[0]}, so nothing was pushed; {hint}")


def require_pass(verified: VerifiedFolder, path: Path) -> GateResult:
    """Return the result of a gate, which has to be a pass of exactly the model in this folder."""
    if verified.export:
        raise CompressionError(
            "--require-gate is for safetensors checkpoints, which the gate judges; push the folder "
            "that was judged, its exports go with it from their sub-folders"
        )
    result = read_gate(path)
    if result.verdict != "pass":
        raise CompressionError(
            f"the gate in {path} says {result.verdict} for {result.compressed}, so nothing was "
            "pushed; push what passes"
        )
    judged = result.compressed_identity
    if "commit" in judged:
        raise CompressionError(
            f"the gate in {path} judged {judged['repository']} on the Hub and not "
            f"{verified.folder}; run moe-compress gate on the folder"
        )
    folder = verified.folder
    now = identity(ModelSource.of(folder), digests="digests" in judged)
    by_file = []
    for facts in (judged, now):
        # weights with a digest may have another time of change
        weights = facts.get("digests") or {name: rest for name, *rest in facts.get("weights", ())}
        by_file.append({**facts.get("files", {}), **weights})
    before, after = by_file
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise CompressionError(
                f"{name} of {folder} is not the one that the gate in {path} judged; run "
                "moe-compress gate on the folder as it is"
            )
    return result


def default_message(verified: VerifiedFolder) -> str:
    """Return a commit's message: how the model was made, as far as compression.json tells."""
    suffix = f" as {verified.export.upper()}" if verified.export else ""
    try:
        plan = read_plan(verified.folder)
        expert_plan = plan.expert_plan
        base = plan.source.model
        if not expert_plan.layers:
            return f"Made from {base} by {', '.join(step.name for step in plan.steps)}{suffix}"
        counts = {layer.experts for layer in expert_plan.layers}
        kept = f"{expert_plan.experts} of {max(counts)} experts"
        return f"Compressed from {base} by {plan.strategy}, {kept}{suffix}"
    except (OSError, CompressionError):
        return f"Checkpoint {verified.folder.resolve().name}{suffix}"


def belonging(folder: Path, weights: Iterable[str]) -> dict[str, Path]:
    """Return files by path in the repository: these weights, and what beside them a loader or a
    reader needs: configs, the tokenizer, templates, licences, and pictures that the card shows.

    Raises `CompressionError` naming a file that is a link out of the folder.
    """
    names = {f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*")}
    for path in folder.iterdir():
        name = path.name
        if name in {*weights, CARD, RECIPE, SUMS}:
            names.add(name)
        elif not name.startswith(".") and not name.endswith(".index.json"):
            is_licence = name.split(".")[0] in LICENCES and not name.endswith(".lock")
            if is_licence or name.endswith(BESIDE):
                names.add(name)
    card = folder / CARD
    if card.is_file() and _usable(folder, CARD):
        for match in SHOWN.finditer(card.read_text(encoding="utf-8", errors="replace")):
            name = (match[1] or match[2]).removeprefix("./")
            parts = name.split("/")
            plain = not any(part.startswith(".") or not part for part in parts) and "\\" not in name
            if plain and name.lower().endswith(PICTURES) and (folder / name).exists():
                names.add(name)
    return {name: folder / name for name in sorted(names) if _usable(folder, name)}


def _usable(folder: Path, name: str) -> bool:
    """Return True for a file that isn't hidden; raises `CompressionError` for a link that leads out
    or nowhere."""
    path = folder / name
    if name.split("/")[-1].startswith("."):
        return False
    refuse_link(path, folder)
    if path.is_symlink() and not path.exists():
        raise CompressionError(
            f"{path} is a link that leads nowhere; restore the file or remove the link"
        )
    return path.is_file()


def superseded(
    names: Collection[str], pushed: Iterable[str], weights_change: bool
) -> tuple[str, ...]:
    """Return files on the Hub that an earlier model left and that would be taken for parts of the
    one that is pushed.

    A `model.safetensors` there, say, would be loaded in place of new shards. What speaks of the
    earlier weights (compression.json, recipe.yaml, gate.json, exports in sub-folders) goes when the
    weights change."""
    others = set(names) - set(pushed)
    stale = {name for name in others if name == SUMS or WEIGHT_NAMES.fullmatch(name)}
    if weights_change:
        stale |= others & set(OF_THE_WEIGHTS)
        for export, exporter in published_formats():
            if f"{export}/{exporter.FILES[-1]}" in names:
                stale |= {name for name in others if name.startswith(f"{export}/")}
    return tuple(sorted(stale))
