"""A small Mixtral with a byte-level tokenizer, both made in code, and ways to damage a checkpoint; test support."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compressor.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from tests.support import zoo

SPECIAL = ("<pad>", "<s>", "</s>")
VOCABULARY = 256 + len(SPECIAL)
CHAT = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
TEXT = "\n\n".join(
    f"Document {number}: the quick brown fox jumps over {number * 37} lazy dogs." for number in range(40)
)


def tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token for each byte, after three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = chat_template
    return made


def save(folder: Path, name: str = "mixtral", shard: str = "5GB", **overrides: Any) -> Path:
    """Write a tiny model with its tokenizer; returns the folder."""

    def write(first: Path) -> None:
        zoo.build(name, vocab_size=VOCABULARY, **overrides).save_pretrained(first, max_shard_size=shard)
        tokenizer().save_pretrained(first)

    zoo.save_once(folder, (name, shard, overrides), write)
    return folder


def text_file(folder: Path, content: str = TEXT) -> Path:
    """A calibration file."""
    path = folder / "calibration.txt"
    path.write_text(content, encoding="utf-8")
    return path


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Read a JSON file, change it in place, write it back."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a checkpoint that has a single file."""
    tensors = load_file(folder / SINGLE_NAME)
    change(tensors)
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, of however many files."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a safetensors file, leaving its data as they are."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def index_path(folder: Path) -> Path:
    """The index of a sharded checkpoint."""
    return folder / INDEX_NAME


def tree(folder: Path) -> dict[str, str]:
    """SHA-256 by relative path of every file in a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
