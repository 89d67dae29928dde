"""The stock model one decoder layer at a time: what it answers, while each layer's tensors go into the graph's file."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compressor.memory import give_back
from compressor.model.architecture import experts_modules
from compressor.model.loading import PartialModel, parent_and_name
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, LayerVisitor, Pass
from compressor.progress import Progress
from exporters.onnx_experts import WeightFormat
from exporters.onnx_quantized_experts import SCALES
from exporters.onnx_reference import (
    NUDGED,
    NUDGED_NAME,
    Question,
    Reference,
    continued,
    model_inputs,
    nudge,
    nudged,
    per_token,
    prompt_of,
    questions,
    random_tokens,
    sensitivity_of,
)
from exporters.onnx_verify import GREEDY

GIVEN_SEED = 15


class _WidenedModel(PartialModel):
    """A model whose tensors outside the layers are brought into float32 as they are loaded, without another change."""

    units: tuple[str, ...] = ()

    def load(self, keys: Iterable[str]) -> None:
        """Fill these entries; those of a layer keep their dtype, for they are still to be written."""
        wanted = list(keys)
        super().load(wanted)
        widen(self.model, (key for key in wanted if unit_of(key, self.units) is None))


def widen(model: Any, keys: Iterable[str]) -> None:
    """Bring tensors of a model into float32, in place; those of whole numbers stay."""
    for key in keys:
        value = getattr(*parent_and_name(model, key))
        if value.is_floating_point():
            value.data = value.data.float()


def unit_of(key: str, units: Sequence[str]) -> str | None:
    """The decoder layer that a tensor belongs to."""
    return next((unit for unit in units if key.startswith(f"{unit}.")), None)


class _Asked(LayerVisitor):
    """Gives each batch its mask and positions, shows every loaded layer, and keeps the logits."""

    def __init__(self, partial: PartialModel, asked: Sequence[Question], shown: Callable[[str], None]) -> None:
        self.partial, self.asked, self.shown = partial, asked, shown
        self.logits: list[Tensor] = [torch.empty(0)] * len(asked)

    def given(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of the model's forward for the batch that runs."""
        asked = self.asked[self.at.batch]
        return args, kwargs | model_inputs(model, asked.tokens, 0, asked.mask)

    def replaced(self, unit: str, own: Forward) -> Forward:
        """The layer's own forward, of nudged values where the batch that runs is asked so."""
        if self.asked[self.at.batch].name != NUDGED_NAME:
            return own

        def moved(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = nudge(args, kwargs)
            return own(*args, **kwargs)

        return moved

    def loaded(self, unit: str) -> None:
        self.shown(unit)
        widen(self.partial.model, self.partial.keys_under(unit))

    def finished(self, batch: int, output: Any) -> None:
        self.logits[batch] = per_token(self.partial.model, self.asked[batch].tokens, output.logits)


def observe_streamed(
    opened: OpenModel, past: bool, tokens: int, progress: Progress, shown: Callable[[PartialModel, str], None]
) -> Reference:
    """What `observe` returns, one layer in memory at a time; a text of random tokens is in place of the greedy one.

    Every layer is `shown` when it is loaded, in its own dtype, before anything passes it.
    """
    inner, units = opened.partial, opened.architecture.units
    partial = _WidenedModel(inner.checkpoint, inner.config, inner.dtype, inner.device)
    partial.units = units
    widen(partial.model, (name for name, value in partial.model.named_buffers() if value.device.type != "meta"))
    model, config = partial.model, inner.config
    asked, prompt, count = list(questions(model.config, past)), prompt_of(config), continued(model, tokens)
    given = random_tokens(config, 1, count, GIVEN_SEED)
    asked.append(nudged(asked[NUDGED]))
    if count:
        text = torch.cat([prompt, given[:, :-1]], dim=1)
        asked.append(Question(GREEDY, text, torch.ones_like(text), (text.shape[1],)))
    visitor = _Asked(partial, asked, lambda unit: shown(partial, unit))
    handle = model.register_forward_pre_hook(visitor.given, with_kwargs=True)
    widened, asked_tokens = replace(opened, partial=partial), [each.tokens for each in asked]
    try:
        Pass(widened, asked_tokens, progress, "the stock model, layer by layer", to_end=True).run(visitor)
    finally:
        handle.remove()
    cases = tuple(each.answered(logits) for each, logits in zip(asked, visitor.logits, strict=True))
    kept = [case for case in cases if case.name not in (NUDGED_NAME, GREEDY)]
    moved = cases[len(kept)].logits
    chosen = cases[-1].logits[0, prompt.shape[1] - 1 :] if count else torch.zeros(0, 1)
    return Reference(
        type(model).__name__,
        tuple(kept),
        prompt,
        chosen.argmax(-1) if count else given[0],
        chosen,
        given[0],
        sensitivity_of(kept[NUDGED].logits, moved),
    )


def round_layer(partial: PartialModel, unit: str, weights: WeightFormat) -> None:
    """Round the experts of a loaded layer, or of the whole model for an empty name, if `weights` are rounded."""
    for name, experts in experts_modules(partial.model):
        if weights.rounded is not None and (not unit or name.startswith(f"{unit}.")):
            weights.rounded(experts)


def forget_scales(partial: PartialModel, unit: str) -> None:
    """Let go of what rounding left with the experts of a layer."""
    for name, experts in experts_modules(partial.model):
        if name.startswith(f"{unit}.") and hasattr(experts, SCALES):
            delattr(experts, SCALES)
    give_back()
