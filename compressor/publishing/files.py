"""Which files of a folder belong on the Hub, none of them a link out of it; and what an earlier model left there."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from compressor.checkpoint.reader import INDEX_NAME, refuse_link
from compressor.errors import CompressionError
from compressor.recipe.recipe import RECIPE
from compressor.replaceable import TEMPLATES

BESIDE = (".bpe", ".codes", ".jinja", ".json", ".model", ".spm", ".tiktoken", ".txt")  # configs, tokenizer, templates
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
PICTURES = (".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp")
CARD = "README.md"
OF_THE_WEIGHTS = ("compression.json", RECIPE, "gate.json")  # what says how they were made and judged
SHOWN = re.compile(r"!\[[^\]]*\]\(\s*<?([^)\s>]+)|<img\b[^>]*?\bsrc=[\"']([^\"']+)", re.IGNORECASE)
WEIGHT_NAMES = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def belonging(folder: Path, weights: Iterable[str]) -> dict[str, Path]:
    """Path in the repository -> file: these weights, and what beside them a loader or a reader needs.

    Raises `CompressionError` naming a file that is a link out of the folder.
    """
    wanted = {*weights, CARD, RECIPE}
    names = [path.name for path in folder.iterdir() if _beside(path.name) or path.name in wanted]
    names += [f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*")]
    names += _pictures(folder)
    return {name: folder / name for name in sorted({*names}) if _usable(folder, name)}


def left_out(folder: Path, taken: Iterable[str]) -> tuple[str, ...]:
    """What lies openly in the folder and is not taken, sub-folders with a slash."""
    known = {name.split("/")[0] for name in taken}
    names = sorted(path for path in folder.iterdir() if path.name not in known and not path.name.startswith("."))
    return tuple(f"{path.name}/" if path.is_dir() else path.name for path in names)


def _beside(name: str) -> bool:
    """Whether a file's name says that it is a config, part of the tokenizer, a template or a licence."""
    if name.startswith(".") or (name.endswith(".index.json") and name != INDEX_NAME):
        return False
    return name.endswith(BESIDE) or (name.split(".")[0] in LICENCES and not name.endswith(".lock"))


def _pictures(folder: Path) -> Iterator[str]:
    """Pictures in the folder that its own card shows."""
    card = folder / CARD
    if not (card.is_file() and _usable(folder, CARD)):
        return
    for match in SHOWN.finditer(card.read_text(encoding="utf-8", errors="replace")):
        name = (match[1] or match[2]).removeprefix("./")
        parts = name.split("/")
        plain = not any(part.startswith(".") or not part for part in parts) and "\\" not in name
        if plain and name.lower().endswith(PICTURES) and (folder / name).exists():
            yield name


def _usable(folder: Path, name: str) -> bool:
    """Whether it is a file; raises `CompressionError` for a link that leads out of the folder or nowhere."""
    path = folder / name
    if name.split("/")[-1].startswith("."):
        return False
    refuse_link(path, folder)
    if path.is_symlink() and not path.exists():
        raise CompressionError(f"{path} is a link that leads nowhere; restore the file or remove the link")
    return path.is_file()


def superseded(names: Iterable[str], pushed: Iterable[str], weights_change: bool) -> tuple[str, ...]:
    """Files on the Hub that an earlier model left and that would be taken for parts of the one that is pushed.

    A `model.safetensors` there, say, would be loaded in place of new shards. What speaks of the earlier weights
    (compression.json, recipe.yaml, gate.json, the graph in onnx/) goes when the weights change.
    """
    known, there = frozenset(pushed), frozenset(names)
    ours = "onnx/onnx_export.json" in there
    return tuple(
        name
        for name in sorted(there - known)
        if WEIGHT_NAMES.fullmatch(name)
        or (weights_change and (name in OF_THE_WEIGHTS or (ours and name.startswith("onnx/"))))
    )
