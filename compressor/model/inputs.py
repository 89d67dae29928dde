"""The inputs of the stock forward: token ids, and a processor's tensors for pictures or sound."""

import inspect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from compressor.model.moe_layer import decoder_layer_of


class Inputs(Tensor):
    """Token ids [1, L] of one sequence with media (pictures, video, sound), and its processor's
    other tensors.

    It can replace a batch of token ids anywhere. Every operation on it returns plain token ids,
    except `split` and indexing that selects its only row."""

    more: Mapping[str, Tensor]  # the forward's other arguments by name, such as pixel_values
    media: Tensor  # mask [1, L] of the tokens that stand for a picture, a video or sound

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, tokens: Tensor, media: Tensor, more: Mapping[str, Tensor]) -> "Inputs":
        """Return the sequence of these token ids and their `media` mask, both [1, L]."""
        assert len(tokens) == 1 and tokens.shape == media.shape, "media come one sequence at a time"
        inputs = tokens.as_subclass(cls)
        inputs.media = media
        inputs.more = dict(more)
        return inputs

    def split(self, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
        """Return itself alone: it has one row."""
        assert dim == 0, "a sequence with media is not cut"
        return (self,)

    def __getitem__(self, index: Any) -> Tensor:
        """Return itself if the index selects its row as a batch of one, and plain token ids
        otherwise."""
        plain = self.as_subclass(Tensor)[index]
        return self if plain.shape == self.shape else plain

    @property
    def counted(self) -> Tensor:
        """Mask [1, L] of the tokens that evaluations count: the text after the first picture or
        sound, if any."""
        begun = self.media.cumsum(1) > 0 if self.media.any() else torch.ones_like(self.media)
        return begun & ~self.media


def cache_argument(model: nn.Module) -> str:
    """Return the name under which the stock forward takes its cache, and its output holds it."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def forward_inputs(batch: Tensor, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the stock forward's arguments for a batch: token ids [B, L], and all tensors of a
    sequence with media.

    Floating-point tensors are cast to the dtype of the model, as by `BatchFeature.to`.
    """
    inputs = {"input_ids": batch.as_subclass(Tensor).to(device)}
    for name, value in batch.more.items() if isinstance(batch, Inputs) else ():
        inputs[name] = value.to(device, dtype if value.is_floating_point() else None)
    return inputs


def parts_of(batch: Tensor) -> Sequence[Tensor]:
    """Return masks [T] of the tokens that layers for pictures may see alone, and of the others.

    The marks of the forward count, too: for ernie4_5_vl_moe, tokens around a picture belong to it.
    """
    if not isinstance(batch, Inputs):
        return ()
    marked = [value > 0 for name, value in batch.more.items() if name.endswith("mm_token_type_ids")]
    parts = list[Tensor]()
    for mask in (batch.media, *marked):
        for part in (mask.flatten(), ~mask.flatten()):
            if not any(torch.equal(part, known) for known in parts):
                parts.append(part)
    return parts


def tower_blocks(model: nn.Module, layer_names: Sequence[str]) -> dict[str, str]:
    """Return the blocks of the towers beside the decoder layers, by name, each with its vision or
    audio tower's name.

    A tower is an outermost module without decoder layers that has an `nn.ModuleList`; its blocks
    are that list's."""
    above = set[str]()  # modules that hold decoder layers, and these
    for layer_name in layer_names:
        above.update(accumulate(layer_name.split("."), "{}.{}".format))
    blocks = dict[str, str]()
    for name, module in model.named_modules():
        inside = decoder_layer_of(f"{name}.", (*layer_names, *blocks))
        if inside or name in above or not isinstance(module, nn.ModuleList):
            continue
        prefixes = accumulate(name.split("."), "{}.{}".format)
        tower = next(prefix for prefix in prefixes if prefix not in above)
        blocks |= {f"{name}.{number}": tower for number in range(len(module))}
    return blocks
