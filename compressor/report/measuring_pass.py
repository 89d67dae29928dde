"""Source and output side by side in one streamed pass, as correction lets a layer and its smaller one take turns.

Of every two batches one goes through the source's layers and the next, of the same text, through the output's. While
the source's passes a layer, the output's MoE block also runs on what the source's block is given, so that corrections
and merged routers count as they are stored. No more than one layer of each is in memory. T tokens, E experts, H hidden.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial as bind
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import sample_positions
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer, layers_by_unit
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, LayerStream, LayerVisitor
from compressor.progress import Progress
from compressor.report.data import LayerMeasures
from compressor.report.measuring_experts import Likeness, compared, sample_size, shares
from compressor.statistics.statistics import Collector

VISITS = frozenset({"routed_count"})


@dataclass(slots=True)
class Gap:
    """How far outputs are from the source's, summed over tokens."""

    missed: float = 0.0  # ||y' - y||^2
    energy: float = 0.0  # ||y||^2
    cosines: float = 0.0
    tokens: int = 0

    def add(self, source: Tensor, ours: Tensor, width: int) -> None:
        """Count the rows of [..., H] each, or of [T H] laid end to end, which are `width` wide."""
        y, z = (value.detach().reshape(-1, (width, *value.shape[1:])[-1]).float() for value in (source, ours))
        norms = y.norm(dim=-1).double() * z.norm(dim=-1).double()
        cosines = (y * z).sum(-1).double() / norms.where(norms > 0, 1)
        same = (y == z).all(dim=-1)  # rows of zeros among them, and rounding is no difference
        self.missed += float((z - y).square().sum(dtype=torch.float64))
        self.energy += float(y.square().sum(dtype=torch.float64))
        self.cosines += float(cosines.clamp(-1, 1).where(~same, 1).sum())
        self.tokens += len(y)

    @property
    def error(self) -> float | None:
        """||y' - y||^2 / ||y||^2; the numerator alone where y is zero, None without tokens or a finite value."""
        return self._finite(self.missed / (self.energy or 1.0))

    @property
    def cosine(self) -> float | None:
        """The mean over tokens; None without tokens or a finite value."""
        return self._finite(self.cosines / max(self.tokens, 1))

    def _finite(self, value: float) -> float | None:
        return float(f"{value:.6g}") if self.tokens and math.isfinite(value) else None


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found


class _Watch:
    """One MoE layer of the models, source and output or the output alone, while the batches pass it."""

    def __init__(self, layers: Sequence[MoeLayer], models: Sequence[Any], collectors: Sequence[Collector]) -> None:
        self.layer, self.collectors = layers[0], collectors  # in the order of the models' turns
        self.block, self.stream, self.width = Gap(), Gap(), int(models[0].config.get_text_config().hidden_size)
        self.outputs = [torch.empty(0), torch.empty(0)]
        block, self.small = (model.get_submodule(self.layer.block) for model in (models[0], models[-1]))
        hooks = [block.register_forward_hook(self._compare, with_kwargs=True, prepend=True)]  # before all is cut short
        # a decoder layer that itself holds router and experts is judged by its experts' part
        judged = self.layer.name if self.layer.block == self.layer.unit else self.layer.block
        for turn, model in enumerate(models):
            hooks.append(model.get_submodule(judged).register_forward_hook(bind(self._keep, turn), prepend=True))
        self.hooks = hooks

    def _keep(self, turn: int, module: Any, args: Any, output: Any) -> None:
        self.outputs[turn] = _first(output)

    def _compare(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Have the output's block run on the arguments of the source's, unless it is the output's turn anyway."""
        source, self.outputs[0] = self.outputs[0], torch.empty(0)
        if source.numel() and module is not self.small:
            self.small(*args, **kwargs)
            self.block.add(source, self.outputs[1], self.width)

    def enter(self, number: int, turn: int) -> None:
        """This batch of the text is about to run through the model whose turn it is."""
        self.detach()
        self.collectors[turn].enter(number)

    def detach(self) -> None:
        """Stop collecting."""
        for collector in self.collectors:
            collector.detach()


class _SideBySide(LayerVisitor):
    """Lets every second batch pass the output's layers, and compares both; a single model is watched alone."""

    def __init__(
        self, models: Sequence[OpenModel], sizes: list[int], likeness: Callable[[str], Likeness], seed: int
    ) -> None:
        self.models, self.sizes, self.likeness, self.seed = models, sizes, likeness, seed
        self.watches: list[_Watch] = []
        self.turn, self.held, self.random = 0, torch.empty(0), torch.get_rng_state()

    def loaded(self, unit: str) -> None:
        for model in self.models[1:]:
            model.partial.load(model.partial.keys_under(unit))
        layers = ([layer for layer in model.architecture.layers if layer.unit == unit] for model in self.models)
        self.watches = [self._watch(*pair) for pair in zip(*layers, strict=True)]

    def _watch(self, *layers: MoeLayer) -> _Watch:
        models, seed = [model.partial.model for model in self.models], self.seed
        positions = sample_positions(sum(self.sizes), sample_size(layers[0].experts), seed)
        needs = [VISITS | self.likeness(layers[0].name).needs, VISITS][-len(models) :]
        each = zip(layers, models, needs, strict=True)
        return _Watch(layers, models, [Collector(*one, positions, self.sizes, seed) for one in each])

    def entering(self, batch: int) -> None:
        number, self.turn = divmod(batch, len(self.models))
        for watch in self.watches:
            watch.enter(number, self.turn)
        if self.turn:  # each model draws the same numbers
            torch.set_rng_state(self.random)
        else:
            self.random = torch.get_rng_state()

    def replaced(self, unit: str, own: Forward) -> Forward:
        return bind(self._pass, self.models[1].partial.model.get_submodule(unit).forward if self.turn else own)

    def _pass(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a layer; what the output's makes of a batch is compared with what the source's has just made of it."""
        output = forward(*args, **kwargs)
        for watch in self.watches if self.turn else ():
            watch.stream.add(self.held, _first(output), watch.width)
        self.held = _first(output)
        return output

    def finish(self) -> Iterator[LayerMeasures]:
        """The measures of the layers that every batch has passed, and that are still loaded."""
        for watch in self.watches:
            *before, after = [collector.finish(None) for collector in watch.collectors]
            found = LayerMeasures(watch.layer.name, visits_after=shares(after.routed_count))
            for stats in before:
                found = LayerMeasures(
                    found.module,
                    *compared(self.likeness(found.module), stats, self.models[0].partial.model),
                    shares(stats.routed_count),
                    found.visits_after,
                    watch.block.error,
                    watch.block.cosine,
                    watch.stream.error,
                    watch.stream.cosine,
                )
            yield found

    def clear(self, unit: str = "") -> None:
        """Leave the models as they were."""
        for watch in self.watches:
            watch.detach()
            for hook in watch.hooks:
                hook.remove()
        self.watches = []
        for model in self.models[1:]:
            model.partial.release(unit)


def measure_layers(
    output: OpenModel,
    source: OpenModel | None,
    batches: Sequence[Tensor],
    likeness: Callable[[str], Likeness],
    progress: Progress,
    seed: int = 0,
) -> Iterator[LayerMeasures]:
    """Each MoE layer's measures in order, on batches of token ids [B, L]; without a source, the visits after alone."""
    models = [output] if source is None else [source, output]
    one, two = ((m.architecture.units, [layer.name for layer in m.architecture.layers]) for m in (models[0], output))
    if one != two:
        raise CompressionError(
            f"{models[0].source.label} and {output.source.label} have different layers, so they are no source and its "
            "output; name the source with --model"
        )
    by_unit, doubled = layers_by_unit(output.architecture.layers), [batch for batch in batches for _ in models]
    progress.start("measure", len(by_unit))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        both = _SideBySide(models, [batch.numel() for batch in batches], likeness, seed)
        with closing(LayerStream(models[0].partial, doubled, one[0], by_unit).passing(both)) as passed:
            try:
                for unit in passed:
                    yield from both.finish()
                    if unit in by_unit:
                        progress.advance(unit)
                    both.clear(unit)
            finally:
                both.clear()
