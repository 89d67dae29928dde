"""How text is generated, and which token comes next: the likeliest, or one drawn.

It is drawn from the softmax that temperature, top-k and top-p leave. Top-p, or nucleus sampling: Holtzman et al.,
ICLR 2020, arXiv:1904.09751; top-k: Fan et al., ACL 2018, arXiv:1805.04833.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.opened import DTYPES

Choose = Callable[[Tensor], int]  # [V] logits -> token id


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What is asked of a model beside the prompt."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy: always the likeliest token
    top_p: float | None = None  # sampling only: the fewest tokens that hold this probability
    top_k: int | None = None  # sampling only: this many of the likeliest tokens
    seed: int = 0
    chat: bool = False  # the prompt is a user's message, in the tokenizer's chat template
    device: str = "auto"
    dtype: str = "auto"  # of a safetensors checkpoint; an ONNX graph has its own
    revision: str | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if self.max_new_tokens < 1:
            raise CompressionError(f"--max-new-tokens {self.max_new_tokens} generates nothing; give at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise CompressionError(
                f"--temperature {self.temperature} is no temperature; give 0 for the likeliest token, or more to sample"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise CompressionError(f"--top-p {self.top_p} is no probability; give a number above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise CompressionError(f"--top-k {self.top_k} leaves no token; give at least 1")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise CompressionError("--top-p and --top-k have no effect without sampling; add --temperature 1")
        if not 0 <= self.seed < 2**63:
            raise CompressionError(f"--seed {self.seed} is out of range; give a whole number from 0 to below 2**63")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise CompressionError(f"there is no dtype {self.dtype!r}; known are auto, {', '.join(DTYPES)}")


def probabilities(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Distribution that the next token is drawn from: [V] -> [V] in float64, summing to 1; ties favour lower ids.

    Top-k comes first; top-p then takes, of what is left, the fewest of the likeliest tokens that hold that share.
    """
    scaled = (logits.double() - logits.max().double()) / temperature  # the largest is 0: no temperature overflows
    order = scaled.argsort(descending=True, stable=True)
    ranked = torch.softmax(scaled[order][:top_k], dim=0)
    if top_p is not None:
        before = ranked.cumsum(0) - ranked
        ranked = ranked.where(before < top_p, 0.0)
    found = torch.zeros_like(scaled)
    found[order[: len(ranked)]] = ranked / ranked.sum()
    return found


def chooser(options: GenerationOptions) -> Choose:
    """The rule that these options ask for; what it draws depends on the seed alone."""
    generator = torch.Generator().manual_seed(options.seed)

    def choose(logits: Tensor) -> int:
        if not bool(logits.max().isfinite()):  # NaN and infinity both come out of a maximum
            raise CompressionError(
                "the model's logits are not finite; try --dtype float32, and check its weights if that does not help"
            )
        if options.temperature == 0:
            return int(logits.argmax())
        drawn = probabilities(logits, options.temperature, options.top_k, options.top_p)
        return int(torch.multinomial(drawn, 1, generator=generator))

    return choose
