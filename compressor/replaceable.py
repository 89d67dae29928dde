"""What --overwrite may replace: what this tool wrote, told by its content, or a folder of nothing but a checkpoint."""

import json
import os
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError

TOOL = "moe-compressor"
RECORDS = ("compression.json", "onnx_export.json")  # what an output of this tool tells of itself
PAGE_END = 2_000  # bytes at a page's end that hold who made it
TEMPLATES = "additional_chat_templates"  # the one sub-folder that loaders read
WEIGHTS = re.compile(r".+\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|onnx\.data)")
BESIDE = re.compile(
    r"(.+[_-])?(config|tokenizer|template|params)\.json|(special_tokens_map|added_tokens|vocab|gate)\.json"
    r"|.+\.index\.json|(vocab|merges)\.txt|.+\.(tiktoken|spm|bpe|codes|jinja)|.*(tokenizer|spiece|sentencepiece).*\.model"
    r"|(configuration|modeling|tokenization|processing|image_processing)_\w+\.py|recipe\.yaml|\.git(attributes|ignore)"
    r"|(readme|licen[cs]e|notice|copying|use_policy|acceptable_use_policy)([._-].*)?",
    re.IGNORECASE,
)


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is none that can be read."""
    try:
        with path.open("rb") as stream:
            if not stream.read(64).lstrip().startswith(b"{"):
                return {}  # weights of many gigabytes are not read
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_page(path: Path, made_by: str) -> bool:
    """Whether a file is a page that says at its end by what it was made, as the pages of this tool do."""
    try:
        with path.open("rb") as stream:
            start = stream.read(64)
            stream.seek(-min(PAGE_END, path.stat().st_size), os.SEEK_END)
            end = stream.read()
    except OSError:
        return False
    return start.lstrip().lower().startswith(b"<!doctype html") and made_by.encode() in end


def refuse_replacing(out: Path) -> None:
    """Refuse to replace anything but an empty folder, an output of this tool, or nothing but a checkpoint's files."""
    remedy = "so --overwrite will not replace it"
    entries = [] if out.is_symlink() or not out.is_dir() else sorted(out.iterdir())
    own = any(json_object(out / name).get("tool") == TOOL for name in RECORDS)
    checkpoint = (out / "config.json").is_file() and any(WEIGHTS.fullmatch(path.name) for path in entries)
    if out.is_symlink() or not out.is_dir() or (entries and not own and not checkpoint):
        raise CompressionError(f"{out} is not a checkpoint folder, {remedy}; name another folder")
    for path in entries:
        if not (_is_export(path) if path.is_dir() else own or _is_of_checkpoint(path.name)):
            raise CompressionError(
                f"{out} holds {path.name}, which is no part of a checkpoint, {remedy}; move that or name another folder"
            )


def _is_of_checkpoint(name: str) -> bool:
    return bool(WEIGHTS.fullmatch(name) or BESIDE.fullmatch(name)) or name in RECORDS


def _is_export(folder: Path) -> bool:
    """Whether a subfolder is one that compress makes: chat templates, or an exporter's."""
    exporters = entry_points(group="moe_compressor.exporters").names
    return not folder.is_symlink() and (folder.name == TEMPLATES or folder.name in exporters)
