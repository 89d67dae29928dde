"""Which token comes next: the likeliest, or one drawn from the softmax that temperature, top-k and top-p leave.

Top-p, or nucleus sampling: Holtzman et al., ICLR 2020, arXiv:1904.09751; top-k: Fan et al., ACL 2018, arXiv:1805.04833.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.generation.options import GenerationOptions

Choose = Callable[[Tensor], int]  # [V] logits -> token id


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
