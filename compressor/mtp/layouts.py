"""Layouts of multi-token-prediction heads: whose tensors stand for what, told by their names alone.

Two are known. DeepSeek-V3's, shared by GLM-4-MoE and others: a decoder layer numbered past the last, with `enorm`,
`hnorm`, `eh_proj` and `shared_head` (or `final_layernorm`) beside its own tensors. Qwen3-Next's, shared by Qwen3.5 and
Mellum: `mtp.layers.N`, with `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `fc` and `norm` beside the layers. Both
project the normed embedding of the next token, followed by the normed last hidden state.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from compressor.errors import CompressionError

PARTS = {  # what stands beside a head's decoder layer, by its name there
    "enorm.weight": "embedding_norm",
    "pre_fc_norm_embedding.weight": "embedding_norm",
    "hnorm.weight": "hidden_norm",
    "pre_fc_norm_hidden.weight": "hidden_norm",
    "eh_proj.weight": "projection",
    "fc.weight": "projection",
    "shared_head.norm.weight": "norm",
    "final_layernorm.weight": "norm",
    "norm.weight": "norm",
    "shared_head.head.weight": "output",
    "embed_tokens.weight": "embedding",
}
NEEDED = ("embedding_norm", "hidden_norm", "projection", "norm")
ROOT = "mtp."
OWN_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Stored tensors of one head: those of its decoder layer by what follows `prefix`, and those beside it by part."""

    prefix: str  # "model.layers.61." or "mtp.layers.0."
    number: int  # as a decoder layer, counted on from the model's last
    block: tuple[str, ...]
    parts: dict[str, str]  # of `PARTS`' values, the stored names

    @property
    def unit(self) -> str:
        """The head's name as a decoder layer."""
        return self.prefix.removesuffix(".")

    @property
    def stored(self) -> tuple[str, ...]:
        """All its tensors' names."""
        return (*(self.prefix + name for name in self.block), *self.parts.values())


def head_names(left_out: Iterable[str], container: str, layers: int) -> tuple[HeadNames, ...]:
    """The heads among tensors that the stock model does not load; none where no name speaks of one.

    `container` is how the names of decoder layers begin before their number, of which there are `layers`. Raises
    `CompressionError` naming a tensor that none of the known layouts has, or a part that is missing.
    """
    names = sorted(left_out)
    found = list[HeadNames]()
    for number in count(layers):
        prefix = f"{container}{number}."
        own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if not own:
            break
        parts = {PARTS[name]: prefix + name for name in own if name in PARTS}
        found.append(HeadNames(prefix, number, tuple(name for name in own if name not in PARTS), parts))
    if not found:
        found = _own_layers([name.removeprefix(ROOT) for name in names if name.startswith(ROOT)], layers)
    for head in found:
        if missing := [part for part in NEEDED if part not in head.parts]:
            raise CompressionError(f"{head.prefix}* has no tensor for its {missing[0].replace('_', ' ')}")
        if not head.block:
            raise CompressionError(f"{head.prefix}* has no decoder layer of its own")
    return tuple(found)


def _own_layers(names: list[str], layers: int) -> list[HeadNames]:
    """Heads under `mtp.`, which share what stands beside their layers."""
    blocks: dict[int, list[str]] = {}
    parts: dict[str, str] = {}
    for name in names:
        if inside := OWN_LAYER.match(name):
            blocks.setdefault(int(inside.group(1)), []).append(name[inside.end() :])
        elif name in PARTS:
            parts[PARTS[name]] = ROOT + name
        else:
            raise CompressionError(f"no known layout of a head has the tensor {ROOT + name!r}")
    if names and sorted(blocks) != list(range(max(len(blocks), 1))):
        raise CompressionError(f"the layers under {ROOT!r} are numbered {sorted(blocks)}")
    return [
        HeadNames(f"{ROOT}layers.{number}.", layers + number, tuple(own), parts)
        for number, own in sorted(blocks.items())
    ]
