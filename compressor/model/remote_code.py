"""Code named by a checkpoint's configs: it is neither run nor copied, and its names are left
out."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers

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


def load_stock(kind: str, folder: Path) -> Any:
    """Load a tokenizer or processor from a folder by the transformers class of this name, without
    its own code."""
    configs = naming_code(folder)
    with quiet_transformers(), TemporaryDirectory() as name:
        plain = folder
        if configs:  # a copy of the folder, without weights, whose configs name no code
            plain = Path(name)
            for path in (*folder.glob("*"), *folder.glob(f"{TEMPLATES}/*.jinja")):
                copy = plain / path.relative_to(folder)
                if path in configs:
                    copy.write_bytes(json_bytes(without_code(read_object(path))))
                elif path.is_file() and path.suffix != ".safetensors":
                    copy.parent.mkdir(exist_ok=True)
                    copy.symlink_to(path.resolve())
        # None would ask
        return getattr(transformers, kind).from_pretrained(str(plain), trust_remote_code=False)
