"""Code that a checkpoint's configs name: it is neither run nor carried, and its names are left out."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compressor.files import TEMPLATES
from compressor.progress import quiet_transformers
from compressor.records import read_object

FIELDS = ("auto_map", "custom_pipelines")
NAMED = re.compile(f'"({"|".join(FIELDS)})"'.encode())


def without_code(node: Any) -> Any:
    """Return a config's JSON without the fields that name code, at any depth."""
    if isinstance(node, list):
        return [without_code(item) for item in node]
    if isinstance(node, dict):
        return {name: without_code(value) for name, value in node.items() if name not in FIELDS}
    return node


def json_bytes(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def naming_code(folder: Path) -> list[Path]:
    """Return the configs of a folder that name code."""
    configs = [path for path in sorted(folder.glob("*config.json")) if path.is_file()]
    return [path for path in configs if NAMED.search(path.read_bytes())]


def link_files(files: dict[Path, Path], folder: Path) -> None:
    """Fill a folder with links to all files but weights, by their place in it."""
    for place, source in files.items():
        if source.is_file() and source.suffix != ".safetensors":
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).symlink_to(source.resolve())


def files_beside(folder: Path) -> dict[Path, Path]:
    """Return what lies in a folder and among its chat templates, by its place there."""
    found = [*folder.glob("*"), *folder.glob(f"{TEMPLATES}/*.jinja")]
    return {path.relative_to(folder): path for path in found}


@contextmanager
def stock_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder without its weights, whose configs name no code; itself if that is so already."""
    configs = naming_code(folder)
    if not configs:
        yield folder
        return
    with TemporaryDirectory() as scratch:
        link_files(files_beside(folder), Path(scratch))
        for path in configs:
            (Path(scratch) / path.name).unlink()
            (Path(scratch) / path.name).write_bytes(json_bytes(without_code(read_object(path))))
        yield Path(scratch)


def load_stock(kind: str, folder: Path) -> Any:
    """Return what transformers' class of that name loads from a folder, such as a tokenizer, without its own code."""
    import transformers

    with quiet_transformers(), stock_folder(folder) as plain:
        return getattr(transformers, kind).from_pretrained(str(plain), trust_remote_code=False)  # None would ask
