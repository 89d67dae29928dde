"""The contrastive loss of a whole model: the mean over its layers with LoRA experts (CoMoE, equations 12 and 13)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.comoe.layer import LoraExperts, Seen
from compressor.steps.distill.contrastive import EPSILON, contrastive_loss


@dataclass(frozen=True, slots=True)
class Contrast:
    """How the contrastive loss is computed."""

    temperature: float = 0.07
    tokens: int | None = 512  # of a batch that each layer's loss is computed on, drawn anew each time; None: all
    epsilon: float = EPSILON


def model_contrast(
    layers: Iterable[LoraExperts], mask: Tensor | None, settings: Contrast, generator: torch.Generator
) -> Tensor:
    """The loss of what watched layers have just seen: the mean over layers, and over the tokens of each.

    `mask` [B, S] is 0 for tokens that do not count, such as padding; a layer that sees other tokens than the batch's
    (an expert's own layer) uses all of its own. For each token one of its activated experts is drawn as the anchor.
    """
    seen = [(layer, call) for layer in layers for call in layer.watched or () if len(call.inner)]
    losses = [_layer(layer, call, mask, settings, generator) for layer, call in seen]
    return torch.stack(losses).mean()


def _layer(
    layer: LoraExperts, seen: Seen, mask: Tensor | None, settings: Contrast, generator: torch.Generator
) -> Tensor:
    inner, chosen = seen.inner, seen.chosen
    places = torch.arange(len(inner))
    if mask is not None and mask.numel() == len(inner):
        places = mask.reshape(-1).cpu().nonzero().squeeze(1)
    if settings.tokens is not None and len(places) > settings.tokens:
        drawn = torch.randperm(len(places), generator=generator)[: settings.tokens]
        places = places[drawn.sort().values]
    anchors = torch.randint(chosen.shape[1], (len(places),), generator=generator).to(chosen.device)
    places = places.to(chosen.device)
    outputs = layer.outputs(inner[places])  # [T, E, D_out]
    return contrastive_loss(*apart(outputs, chosen[places], anchors), settings.temperature, settings.epsilon)


def apart(outputs: Tensor, chosen: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Anchor, positives and negatives of Algorithm 1: [T, E, D], [T, K], [T] -> [T, D], [T, K - 1, D], [T, E - K, D].

    `anchors` says which of the chosen experts is each token's anchor.
    """
    tokens, experts, _ = outputs.shape
    top_k = chosen.shape[1]
    rank = torch.full((tokens, experts), 2, device=outputs.device).scatter(1, chosen, 1)  # inactive experts come last
    rank = rank.scatter(1, chosen.gather(1, anchors.unsqueeze(1)), 0)
    order = rank.argsort(dim=1, stable=True)
    sorted_outputs = outputs.gather(1, order.unsqueeze(-1).expand_as(outputs))
    return sorted_outputs[:, 0], sorted_outputs[:, 1:top_k], sorted_outputs[:, top_k:]
