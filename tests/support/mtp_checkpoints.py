"""Tiny checkpoints with multi-token-prediction heads, made in code, and each head's forward in plain torch."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support import small, zoo
from tests.support.small import tensors_of

Tensors = dict[str, Tensor]
NEXTN = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
NORMS = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "norm": "norm"}
QWEN = {**NORMS, "projection": "fc"}


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint with heads: the stock model, its folder, and where each head's block and other tensors stand."""

    name: str
    folder: Path
    model: PreTrainedModel
    field: str
    blocks: tuple[str, ...]
    roots: tuple[str, ...]

    @property
    def tensors(self) -> Tensors:
        """All that is stored."""
        return tensors_of(self.folder)

    def owned(self, names: Any) -> set[str]:
        """Of these tensor names, those of the heads."""
        return {name for name in names if name.startswith((*self.blocks, "mtp."))}


def make(name: str, folder: Path, heads: int = 1, own_ends: bool = False, **overrides: Any) -> Made:
    """A zoo model of three layers, the last of a kind that its heads have, with a tokenizer.

    With `own_ends` a head stores an embedding and a language-model head of its own.
    """
    model = zoo.build(name, vocab_size=small.VOCABULARY, **overrides)
    model.save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    stored, width = tensors_of(folder), int(model.config.hidden_size)
    generator = torch.Generator().manual_seed(7)

    def vector() -> Tensor:
        near = 0.0 if name.startswith("qwen") else 1.0  # zero-centred norms
        return near + 0.2 * torch.randn(width, generator=generator)

    qwen, blocks, roots = name.startswith("qwen"), [], []
    for number in range(heads):
        blocks.append(f"mtp.layers.{number}." if qwen else f"model.layers.{3 + number}.")
        roots.append("mtp." if qwen else blocks[-1])
        with TemporaryDirectory() as other:
            zoo.build(name, seed=11 + number, vocab_size=small.VOCABULARY, **overrides).save_pretrained(other)
            source = tensors_of(Path(other))
        stored |= {blocks[-1] + key.removeprefix("model.layers.2."): value for key, value in source.items()
                   if key.startswith("model.layers.2.")}  # fmt: skip
        for part, word in (QWEN if qwen else NEXTN).items():
            if qwen and number:
                continue
            made = 0.2 * torch.randn(width, 2 * width, generator=generator) if part == "projection" else vector()
            stored[f"{roots[-1]}{word}.weight"] = made
        if own_ends:
            stored[f"{roots[-1]}embed_tokens.weight"] = source["model.embed_tokens.weight"]
            stored[f"{roots[-1]}shared_head.head.weight"] = source["lm_head.weight"]
    save_file({key: value.clone() for key, value in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    field = "mtp_num_hidden_layers" if qwen else "num_nextn_predict_layers"
    small.edit_json(folder / "config.json", lambda config: config.update({field: heads}))
    return Made(name, folder, model, field, tuple(blocks), tuple(roots))
