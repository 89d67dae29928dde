"""What --overwrite may replace: what this tool wrote, told by its records, or a folder of nothing but a checkpoint."""

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

REPORTS = re.compile(  # what other commands may have added to an output
    r"(gate|graph|hubs|attribution|comparison)\.(json|md|xml|png|graphml)"
    r"|(influence|scores|experts|causal|sizes|similarity|visits|errors|times|distillation|active)\.png"
)
MADE_BY = "Made by moe-compress"  # at the end of every page
MOST_NAMED = 3  # stray files in one sentence


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
    """Return True if a file is a page that says at its end by what it was made, as the pages of this tool do."""
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
    checkpoint = (out / "config.json").is_file() and any(WEIGHTS.fullmatch(path.name) for path in entries)
    if out.is_symlink() or not out.is_dir() or (entries and not _records(out) and not checkpoint):
        raise CompressionError(f"{out} is not a checkpoint folder, {remedy}; name another folder")
    if strays := _strays(out):
        more = f" and {len(strays) - MOST_NAMED} more" if len(strays) > MOST_NAMED else ""
        which, them = ("which is", "that") if len(strays) == 1 else ("which are", "them")
        what = f"{', '.join(strays[:MOST_NAMED])}{more}, {which} no part of a checkpoint"
        raise CompressionError(f"{out} holds {what}, {remedy}; move {them} or name another folder")


def _records(folder: Path) -> list[dict[str, Any]]:
    """The records of an output of this tool; none of another folder."""
    return [record for name in RECORDS if (record := json_object(folder / name)).get("tool") == TOOL]


def _strays(folder: Path) -> list[str]:
    """Names of what was neither written by this tool nor is, by its name, part of a checkpoint."""
    records, strays = _records(folder), list[str]()
    carried = [name for record in records if isinstance(names := record.get("files"), list) for name in names]
    subfolders = {TEMPLATES, *entry_points(group="moe_compressor.exporters").names}  # that compress makes
    for path in sorted(folder.iterdir()):
        name = path.name
        if path.is_dir() and not path.is_symlink() and name in subfolders:
            strays += [f"{name}/{stray}" for stray in (_strays(path) if _records(path) else ())]
            continue
        if path.is_dir():
            of_hub = name == ".cache" and not path.is_symlink() and os.listdir(path) == ["huggingface"]  # its client's
            known = of_hub or (bool(records) and all(map(_is_report, path.iterdir())))
        else:
            known = bool(WEIGHTS.fullmatch(name) or BESIDE.fullmatch(name)) or name in (*RECORDS, *carried)
            known = known or (bool(records) and _is_report(path))
        if not known:
            strays.append(name)
    return strays


def _is_report(path: Path) -> bool:
    """Return True if `plan`, `report`, `gate`, `attribute` or `compare` writes such a file."""
    if path.is_symlink() or not path.is_file():
        return False
    written = str(json_object(path).get("format", "")).startswith(f"{TOOL}-")
    return bool(REPORTS.fullmatch(path.name)) or written or is_page(path, MADE_BY)
