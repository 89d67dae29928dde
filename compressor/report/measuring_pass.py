"""Base and output side by side in one streamed pass, as reconstruction lets a layer and its smaller one take turns.

Of every two batches one goes through the base's layers and the next, of the same text, through the output's. While the
base's passes a layer, the output's MoE block also runs on the input of the base's block, so that corrections and merged
routers count as they are stored. No more than one layer of each is in memory. T tokens, E experts, H hidden.

Figure 2 of Zhang et al. 2024, arXiv:2407.09590, shows such matrices. Linear CKA (Kornblith et al. 2019,
arXiv:1905.00414) stands in where a strategy compares no experts. S sampled tokens.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import sample_rows
from compressor.errors import CompressionError, reason_of
from compressor.model.architecture import MoeLayer
from compressor.model.experts import Watch
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, LayerVisitor, Pass
from compressor.progress import Progress
from compressor.recipe.plan import CompressionPlan, LayerPlan
from compressor.recipe.registry import Strategy, load_strategy
from compressor.report.data import LayerMeasures, Matrix
from compressor.statistics.statistics import DENSE, SAMPLED, WEIGHTS, Collector, LayerStatistics
from compressor.steps.prune.similarity import linear_cka

logger = logging.getLogger(__name__)

DIGITS = 4  # of a matrix's entries


def sample_size(experts: int) -> int:
    """Tokens S that experts are compared on; CKA by Gram matrices takes S^2 H multiplications for each expert."""
    return 256 if experts <= 64 else 128  # 256 experts of width 7168 take 4 seconds a layer on one core with 128


def shares(counts: Tensor) -> tuple[float, ...]:
    """Each expert's share of the routed tokens: [E] -> E numbers that sum to 1; zeros where there are none."""
    return tuple(round(share, 6) for share in (counts / counts.sum().clamp(min=1)).tolist())


@dataclass(frozen=True, slots=True)
class Similarity:
    """A way to compare a layer's experts: what it needs measured, and a label with the matrix [E, E], 0 to 1."""

    needs: frozenset[str]
    measure: Callable[[LayerStatistics], tuple[str, Tensor]]

    @torch.no_grad()
    def compare(self, stats: LayerStatistics) -> tuple[Matrix | None, str]:
        """The matrix and its label; None without tokens, or where a plugin's own measure fails."""
        sampled = self.needs & (SAMPLED | DENSE) - {"router_arguments"}
        sizes = (getattr(stats, name).shape[1 if name in DENSE else 0] for name in sampled)
        if self.needs - WEIGHTS and not (stats.tokens and all(sizes)):
            return None, ""
        try:
            (label, table), experts = self.measure(stats), stats.layer.experts
            if table.shape != (experts, experts) or not bool(table.isfinite().all()):
                raise CompressionError(f"its likeness is no matrix of {experts} x {experts} finite numbers")
        except Exception as error:  # of a plugin: a report can do without
            logger.warning("%s: its strategy cannot compare its experts: %s", stats.layer.name, reason_of(error))
            return None, ""
        rows = table.cpu().clamp(0, 1).tolist()
        return tuple(tuple(round(value, DIGITS) for value in row) for row in rows), str(label)


def own_similarity(strategy: Strategy) -> Similarity | None:
    """How a strategy itself compares experts; None if it does not say."""
    measure = strategy.likeness
    return measure and Similarity(strategy.likeness_needs, lambda stats: measure(stats, strategy.options))


def similarity_of(plan: CompressionPlan, layer: LayerPlan | None) -> Similarity:
    """How the layer's strategy compared its experts, or linear CKA of their outputs where it does not say."""

    def by_outputs(stats: LayerStatistics) -> tuple[str, Tensor]:
        outputs = stats.expert_outputs
        return f"linear CKA of expert outputs, {outputs.shape[1]} tokens", linear_cka(outputs)

    won = layer and layer.figures.get("won")  # by a strategy that tries several, each with its default options
    name, options = (str(won), {}) if won is not None else (plan.strategy, plan.options)
    try:
        own = own_similarity(load_strategy(name, options))
    except CompressionError:  # it need not be installed where a report is made
        own = None
    return own or Similarity(frozenset({"expert_outputs"}), by_outputs)


VISITS = frozenset({"routed_count"})


@dataclass(slots=True)
class Gap:
    """How far outputs are from the base's, summed over tokens."""

    missed: float = 0.0  # ||y' - y||^2
    energy: float = 0.0  # ||y||^2
    cosines: float = 0.0
    tokens: int = 0

    def add(self, base: Tensor, ours: Tensor, width: int) -> None:
        """Count the rows of [..., H] each, or of [T H] laid end to end, which are `width` wide."""
        y, z = (value.detach().reshape(-1, (width, *value.shape[1:])[-1]).float() for value in (base, ours))
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


class _Watched:
    """One MoE layer of the models, base and output or the output alone, while the batches pass it."""

    def __init__(
        self,
        layers: Sequence[MoeLayer],
        models: Sequence[Any],
        needs: Sequence[frozenset[str]],
        sizes: Sequence[int],
        seed: int,
    ) -> None:
        self.layer, self.block, self.stream = layers[0], Gap(), Gap()
        self.collectors = [Collector(*one, seed) for one in zip(layers, models, needs, strict=True)]
        self.rows = list(zip(sizes, sample_rows(sizes, sample_size(self.layer.experts), seed), strict=True))
        self.width = int(models[0].config.get_text_config().hidden_size)
        self.outputs = [torch.empty(0), torch.empty(0)]  # of the models' blocks
        self.small = models[1].get_submodule(self.layer.block) if len(models) > 1 else None
        self.watches = [
            Watch(
                model, self.layer, on_output=partial(self._experts_ran, turn), on_block=partial(self._block_ran, turn)
            )
            for turn, model in enumerate(models)
        ]
        for watch in self.watches:
            watch.attach()

    def _experts_ran(self, turn: int, hidden: Tensor, output: Tensor) -> None:
        self.outputs[turn] = output

    def _block_ran(self, turn: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Have the output's block run on the arguments of the base's, unless it is the output's turn anyway."""
        if self.layer.block != self.layer.unit:  # one that is the decoder layer is compared by its experts' outputs
            self.outputs[turn] = _first(output)
        if turn == 0 and self.small is not None:
            base, self.outputs[0] = self.outputs[0], torch.empty(0)
            if base.numel():
                self.small(*args, **kwargs)
                self.block.add(base, self.outputs[1], self.width)

    def stop_collecting(self) -> None:
        for collector in self.collectors:
            collector.detach()

    def measures(self, similarity: Similarity) -> LayerMeasures:
        *before, after = [collector.finish(None) for collector in self.collectors]
        found = LayerMeasures(self.layer.name, visits_after=shares(after.routed_count))
        if not before:
            return found
        matrix, label = similarity.compare(before[0])
        return replace(
            found,
            similarity=matrix,
            similarity_label=label,
            visits_before=shares(before[0].routed_count),
            error=self.block.error,
            cosine=self.block.cosine,
            stream_error=self.stream.error,
            stream_cosine=self.stream.cosine,
        )


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found


class _SideBySide(LayerVisitor):
    """Lets every second batch pass the output's layers, and compares both; a single model is watched alone."""

    def __init__(
        self, models: Sequence[OpenModel], sizes: list[int], similarity: Callable[[str], Similarity], seed: int
    ) -> None:
        self.models, self.sizes, self.similarity, self.seed = models, sizes, similarity, seed
        self.watches: list[_Watched] = []
        self.turn, self.held, self.random = 0, torch.empty(0), torch.get_rng_state()

    def loaded(self, unit: str) -> None:
        for model in self.models[1:]:
            model.partial.load(model.partial.keys_under(unit))
        models = [model.partial.model for model in self.models]
        by_model = ([layer for layer in model.architecture.layers if layer.unit == unit] for model in self.models)
        self.watches = []
        for layers in zip(*by_model, strict=True):
            needs = [VISITS | self.similarity(layers[0].name).needs, VISITS][-len(models) :]
            self.watches.append(_Watched(layers, models, needs, self.sizes, self.seed))

    def entering(self, batch: int) -> None:
        number, self.turn = divmod(batch, len(self.models))
        for watch in self.watches:
            watch.stop_collecting()
            watch.collectors[self.turn].enter(*watch.rows[number])
        if self.turn:  # each model draws the same numbers
            torch.set_rng_state(self.random)
        else:
            self.random = torch.get_rng_state()

    def replaced(self, unit: str, own: Forward) -> Forward:
        forward = self.models[1].partial.model.get_submodule(unit).forward if self.turn else own

        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            for watch in self.watches if self.turn else ():  # with what the base's has just made of the same batch
                watch.stream.add(self.held, _first(output), watch.width)
            self.held = _first(output)
            return output

        return run

    def clear(self, unit: str = "") -> None:
        """Leave the models as they were."""
        for watch in self.watches:
            watch.stop_collecting()
            for each in watch.watches:
                each.detach()
        self.watches = []
        for model in self.models[1:]:
            model.partial.release(unit)


def measure_layers(
    output: OpenModel,
    base: OpenModel | None,
    batches: Sequence[Tensor],
    similarity: Callable[[str], Similarity],
    progress: Progress,
    seed: int = 0,
) -> Iterator[LayerMeasures]:
    """Each MoE layer's measures in order, on batches of token ids [B, L]; without a base, the visits after alone."""
    models = [output] if base is None else [base, output]
    one, two = ((m.architecture.units, [layer.name for layer in m.architecture.layers]) for m in (models[0], output))
    if one != two:
        raise CompressionError(
            f"{models[0].source.label} and {output.source.label} have different layers, so they are no base and its "
            "output; name the base with --model"
        )
    doubled = [batch for batch in batches for _ in models]
    both = _SideBySide(models, [batch.numel() for batch in batches], similarity, seed)
    with closing(Pass(models[0], doubled, progress, "measure", seed).layers(both)) as passed:
        try:
            for unit in passed:
                for watch in both.watches:
                    yield watch.measures(similarity(watch.layer.name))
                both.clear(unit)
        finally:
            both.clear()
