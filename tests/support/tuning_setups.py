"""A tiny dense model and questions to tune it on; test support."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compressor.answers.items import Item
from compressor.comoe.options import ComoeConfig, TuningOptions
from tests.support import small

CONFIG = ComoeConfig(rank=4, experts=4)
OPTIONS = TuningOptions(config=CONFIG, steps=6, batch_size=4, learning_rate=5e-3, log_every=2, save_every=2)


def changed(options: Any, **more: Any) -> Any:
    """The same options but for these."""
    return type(options)(**{**dict(options), **more})


def dense(seed: int = 0) -> Any:
    """A Llama of two layers that knows the tokenizer of `small`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=small.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def save(folder: Path) -> Path:
    """The same on disk, with its tokenizer."""
    dense().save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    return folder


def trained_files(folder: Path) -> dict[str, str]:
    """Digests of what a training has written, but for its cost."""
    assert json.loads((folder / "cost.json").read_text())["seconds"] > 0
    return {name: digest for name, digest in small.tree(folder).items() if name != "cost.json"}


def questions(count: int = 12) -> list[Item]:
    """Two tasks: the letter after one, and the last digit of a number."""
    letters = [Item(f"after {chr(97 + n)} comes", f" {chr(98 + n)}", task="letters") for n in range(count)]
    digits = [
        Item(f"{n * 7} ends with{' ' * (n % 3)}", f" {n * 7 % 10}", tuple(f" {d}" for d in range(10)), "digits")
        for n in range(count)
    ]
    return letters + digits
