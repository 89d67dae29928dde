"""Which files of a folder belong on the Hub, and what must not get there: links out of the folder, access tokens."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from compressor.checkpoint.reader import INDEX_NAME
from compressor.errors import CompressionError, without_tokens
from compressor.planning.recipe import RECIPE
from compressor.publishing.hub import Content
from compressor.surgery.job import CARRIED_FOLDERS

BESIDE = (".bpe", ".codes", ".jinja", ".json", ".model", ".spm", ".tiktoken", ".txt")  # configs, tokenizer, templates
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
PICTURES = (".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp")
TEXTS = (".jinja", ".json", ".md", ".txt", ".yaml", ".yml")
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
    names += [f"{inner}/{path.name}" for inner in CARRIED_FOLDERS for path in (folder / inner).glob("*")]
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
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CompressionError(
            f"{path} is a link to a file outside the folder, which is not pushed; put a copy in its place "
            "(cp -rL copies a folder with what its links lead to)"
        )
    if path.is_symlink() and not path.exists():
        raise CompressionError(f"{path} is a link that leads nowhere; restore the file or remove the link")
    return path.is_file()


def refuse_tokens(files: Mapping[str, Content]) -> None:
    """Refuse a text file that holds what looks like an access token of the Hub, or the one in use; names the file."""
    for name, content in files.items():
        if not (name.lower().endswith(TEXTS) or Path(name).name.split(".")[0] in LICENCES):
            continue
        data = content if isinstance(content, bytes) else content.read_bytes()
        text = data.replace(b"\0", b"").decode("utf-8", errors="replace")  # without NULs, for UTF-16
        if without_tokens(text) != text:
            raise CompressionError(
                f"{name} holds what looks like an access token of the Hub, so nothing was pushed; take it out, and "
                "revoke the token if anybody else may have seen it"
            )


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
