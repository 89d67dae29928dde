"""How the next token is chosen.

Top-p, or nucleus sampling: Holtzman et al., ICLR 2020, arXiv:1904.09751; top-k: Fan et al., ACL
2018, arXiv:1805.04833."""

import torch
from torch import Tensor

from compressor.answers.options import GenerationOptions
from compressor.devices import as_float64
from compressor.errors import CompressionError


def probabilities(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Return the distributions that next tokens are drawn from: [..., V] -> [..., V] in float64,
    summing to 1.

    Top-k comes first; top-p then takes, of what is left, the fewest of the most probable tokens
    that hold that share. Ties favour lower ids."""
    values = as_float64(logits)
    # the largest is 0: no temperature overflows
    scaled = (values - values.amax(-1, keepdim=True)) / temperature
    if top_k is None and top_p is None:
        return torch.softmax(scaled, dim=-1)
    order = scaled.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    ranked = torch.softmax(scaled.gather(-1, order), dim=-1)
    if top_p is not None:
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.where(before < top_p, 0.0)
    return torch.zeros_like(scaled).scatter(-1, order, ranked / ranked.sum(-1, keepdim=True))


def choose(logits: Tensor, options: GenerationOptions, numbers: Tensor) -> Tensor:
    """Return the next token of each row by a number in [0, 1): [B, V], [B] in float64 -> [B].

    It is the token at which the sum of probabilities passes the number, or the most probable one at
    temperature 0."""
    most = logits.max(-1)
    if not bool(most.values.isfinite().all()):  # NaN and infinity both come out of a maximum
        raise CompressionError(
            "the model's logits are not finite; try --dtype float32, and check its weights if "
            "that does not help"
        )
    if not options.temperature:
        return most.indices
    passed = probabilities(logits, options.temperature, options.top_k, options.top_p).cumsum(-1)
    limits = numbers[:, None].to(passed.device) * passed[:, -1:]
    return (passed <= limits).sum(-1)
