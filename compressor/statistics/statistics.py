"""Statistics of one MoE layer, measured while every calibration batch passes it; frozen afterwards.

A statistic is an entry of `LayerStatistics` with a meter, which sees every batch that passes the
layer and returns the value at the end. Sums are over all tokens routed to an expert, in float64.
Samples are of S of the tokens. Gate weights are those that an expert's output is multiplied by. One
pass over the layers measures all that strategies need, each source's tokens apart. T tokens of a
batch, E experts, K top-k, H hidden."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from compressor.data.batches import Calibration, sample_positions
from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model.architecture import Architecture, build_meta
from compressor.model.experts import CHUNK, Choices, moe_hooks
from compressor.model.inputs import Inputs, parts_of
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerVisitor, Pass, as_arguments, hidden_of
from compressor.progress import Progress
from compressor.statistics.meters import (
    CallSample,
    DeletionSum,
    ExpertOutputs,
    ExpertsCall,
    GateSum,
    LayerWeights,
    Meter,
    ModalityCount,
    NormSum,
    Observed,
    PairSum,
    ProbabilitySum,
    RouterArguments,
    RouterArgumentsSample,
    RouterCall,
    RouterLogits,
    RouterOrders,
    Sample,
    SquaredGateOutputSum,
    SquaredNeuronSum,
    StreamEnergySum,
    Weights,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

# the router module of a layer in a model with so many experts
Routers = Callable[[MoeLayer, int], Any]


class Statistic(Generic[T]):
    """The shape and meaning of a statistic, and its meter with options; as an attribute of
    statistics, its value.

    One that was not declared as a need is an error, not a guess. Without a meter it is measured
    elsewhere."""

    def __init__(
        self, shape: str, meaning: str, meter: type[Meter] | None = None, **options: Any
    ) -> None:
        self.shape = shape
        self.meaning = meaning
        self.meter = meter
        self.options = options

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, stats: "LayerStatistics | None", owner: type) -> T:
        if stats is None:
            return cast(T, self)
        if self.name not in stats.values:
            raise CompressionError(
                f"statistic {self.name!r} was not collected for {stats.layer.name}; the strategy "
                "must declare it in "
                "its NEEDS"
            )
        return cast(T, stats.values[self.name])


TensorStatistic = Statistic[Tensor]


@dataclass(frozen=True)
class LayerStatistics:
    """The read-only statistics of one layer; `values` holds those collected, by name.

    S sampled tokens, E experts, K top-k, H hidden, I neurons of an expert.
    """

    layer: MoeLayer
    tokens: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    # sums over each source's tokens, where there are several
    sources: tuple["LayerStatistics", ...] = ()
    shares: Tensor | None = None  # [N, E] of the score of each source, where these are balanced

    routed_count = TensorStatistic("[E]", "tokens sent to each expert", GateSum, power=0)
    modality_count = TensorStatistic(
        "[E, 2]",
        "tokens of text, and of pictures, video or sound, sent to each expert",
        ModalityCount,
    )
    gate_weight_sum = TensorStatistic("[E]", "sum of gate weights over those tokens", GateSum)
    probability_sum = TensorStatistic(
        "[E]",
        "softmax of the router logits (over a skip expert too), summed over all tokens",
        ProbabilitySum,
    )
    norm_sum = TensorStatistic(
        "[E]", "L2 norm of the expert's output, summed over its tokens", NormSum
    )
    squared_norm_sum = TensorStatistic(
        "[E]", "square of that norm, summed over its tokens", NormSum, power=2
    )
    gated_norm_sum = TensorStatistic(
        "[E]", "gate weight times the norm, summed over its tokens", NormSum, gated=True
    )
    squared_gate_sum = TensorStatistic(
        "[E]", "square of the gate weight, summed over its tokens", GateSum, power=2
    )
    squared_gate_output_sum = TensorStatistic(
        "[E, H]",
        "square of the gate weight times the expert's output, summed over its tokens",
        SquaredGateOutputSum,
    )
    squared_gated_norm_sum = TensorStatistic(
        "[E]",
        "square of gate weight times the norm, summed over its tokens",
        NormSum,
        gated=True,
        power=2,
    )
    stream_energy_sum = TensorStatistic(
        "[E]",
        "that square over the squared norm of the token's hidden state behind the decoder layer, "
        "summed alike",
        StreamEnergySum,
    )
    squared_neuron_sum = TensorStatistic(
        "[E, I]",
        "square of the gate weight times what each neuron gives the down projection, summed over "
        "the expert's tokens",
        SquaredNeuronSum,
    )
    squared_deletion_sum = TensorStatistic(
        "[E]",
        "square of how far the layer's output moves when the expert is deleted and the router "
        "takes its next one, "
        "summed over its tokens",
        DeletionSum,
    )
    pair_count = TensorStatistic("[E, E]", "tokens that chose both experts", PairSum, of="tokens")
    pair_norm_sum = TensorStatistic(
        "[E, E]", "product of their gated norms, summed over those tokens", PairSum, of="norms"
    )
    pair_product_sum = TensorStatistic(
        "[E, E]",
        "inner product of their gated outputs, summed over those tokens",
        PairSum,
        of="outputs",
    )
    router_orders = TensorStatistic(
        "[T, E]",
        "all experts from the highest router logit to the lowest, at every token, int16",
        RouterOrders,
    )
    inputs = TensorStatistic(
        "[S, H]", "inputs of the experts at the sampled tokens", CallSample, part="hidden"
    )
    router_logits = TensorStatistic("[S, E]", "router logits there", RouterLogits)
    top_k_index = TensorStatistic("[S, K]", "experts chosen there", CallSample, part="index")
    top_k_weights = TensorStatistic("[S, K]", "their gate weights", CallSample, part="weights")
    router_arguments = Statistic[RouterArguments](
        "",
        "positional and by keyword, what the router was called with there",
        RouterArgumentsSample,
    )
    expert_outputs = TensorStatistic("[E, S, H]", "every expert's output there", ExpertOutputs)
    mixed_outputs = TensorStatistic(
        "[E, S, H]",
        "every expert's output on random mixtures of those inputs",
        ExpertOutputs,
        mixed=True,
    )
    weights = Statistic[LayerWeights](
        "", "the layer's live experts and router modules, to be read only", Weights
    )
    rank_change = TensorStatistic(
        "[E]",
        "AARV: places by which the ranks of later routers' chosen experts change without the "
        "expert, on average over "
        "all tokens, summed over those routers; 0 where there are none",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    def adding(self, **values: Any) -> "LayerStatistics":
        sources = tuple(source.adding(**values) for source in self.sources)
        return replace(self, values={**self.values, **values}, sources=sources)


STATISTICS = {
    name: value for name, value in vars(LayerStatistics).items() if isinstance(value, Statistic)
}
ALL = frozenset(STATISTICS)
WEIGHTS = frozenset({"weights"})
OUTPUTS = frozenset({"expert_outputs", "mixed_outputs"})  # of all experts on the sampled tokens
ATTRIBUTED = frozenset({"rank_change"})  # measured over all layers
# the output of a planned layer can be computed from these
RECONSTRUCTION = frozenset(
    {"inputs", "router_arguments", "top_k_index", "top_k_weights", "expert_outputs", "weights"}
)


def check_needs(needs: frozenset[str], strategy: str) -> None:
    """Refuse an unknown statistic before anything is read."""
    unknown = sorted(needs - ALL)
    if unknown:
        raise CompressionError(
            f"strategy {strategy!r} needs the statistic {unknown[0]!r}, which does not exist; "
            "known are "
            f"{', '.join(sorted(ALL))}"
        )


class Collector:
    """Measures the statistics `needs` of one layer while batches pass it, each source weighted to
    its share."""

    def __init__(
        self,
        layer: MoeLayer,
        model: Any,
        needs: frozenset[str],
        seed: int,
        smaller_router: Any = None,
        shares: Sequence[float] = (1.0,),
    ) -> None:
        self.layer = layer
        self.model = model
        self.shares = shares
        self.tokens = torch.zeros(len(shares), dtype=torch.long)  # by source
        self.source = 0
        experts, router, block = map(model.get_submodule, (layer.name, layer.router, layer.block))
        self.observed = Observed(
            experts, router, block, smaller_router, layer, model.config, seed, len(shares)
        )
        self.meters = {
            name: entry.meter(self.observed, **entry.options)
            for name, entry in STATISTICS.items()
            if name in needs and entry.meter is not None
        }
        # batches with such inputs
        self.infinite = torch.zeros((), dtype=torch.long, device=experts.down_proj.device)
        # which needs a slower forward
        self.watches_experts = any(
            type(meter).experts_ran is not Meter.experts_ran for meter in self.meters.values()
        )
        self.hooks = ExitStack()

    def observe(self, ids: Tensor, rows: Tensor, batch: int = 0, source: int = 0) -> None:
        """Observe a batch of token ids [B, L] while it runs; the tokens at `rows` [s] are
        sampled."""
        self.detach()
        self.source = source
        # of pictures and sound [T]
        media = ids.media if isinstance(ids, Inputs) else torch.zeros_like(ids, dtype=torch.bool)
        self.batch = (source, batch), rows, media.flatten()
        self.parts = parts_of(ids)
        for meter in self.meters.values():
            meter.begin(source)
        hooks = moe_hooks(
            self.model,
            self.layer,
            on_router=self._router_ran,
            on_experts=self._experts_called,
            on_expert_output=self._experts_ran if self.watches_experts else None,
        )
        self.hooks.enter_context(hooks)

    def detach(self) -> None:
        """Stop observing."""
        self.hooks.close()

    def _seen(self, tokens: int) -> tuple[tuple[int, int], Tensor, Tensor]:
        """Return the current batch, its sampled rows among the `tokens` that the layer sees, and
        their media mask [T].

        A layer may see the tokens of pictures alone, or all others; of other tokens no rows are
        sampled."""
        batch, rows, media = self.batch
        if tokens != len(media):
            parts = [part for part in self.parts if int(part.sum()) == tokens]
            if len(parts) == 1:
                positions = parts[0].cumsum(0) - 1
                rows = positions[rows[parts[0][rows]]]
                media = media[parts[0]]
            else:
                rows = torch.arange(0)
                media = torch.zeros(tokens, dtype=torch.bool)
        device = self.infinite.device
        return batch, rows.to(device, non_blocking=True), media.to(device, non_blocking=True)

    def _experts_called(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        if hidden.numel() == 0:
            return
        self.infinite += ~torch.stack(hidden.aminmax()).isfinite().all()  # a NaN is both
        self.tokens[self.source] += len(hidden)
        batch, rows, media = self._seen(len(hidden))
        call = ExpertsCall(batch, rows, hidden, index, weights, media)
        for meter in self.meters.values():
            meter.experts_called(call)

    def _router_ran(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, ...]
    ) -> None:
        logits = output[0].detach().reshape(-1, output[0].shape[-1]).float()
        are_probabilities = ((logits.sum(-1) - 1).abs() < 1e-2).all() & (logits >= 0).all()
        # whose softmax is the same
        logarithms = logits.clamp(min=torch.finfo(torch.float32).tiny).log()
        batch, rows, _ = self._seen(len(logits))
        call = RouterCall(
            batch,
            rows,
            torch.where(are_probabilities, logarithms, logits),
            as_arguments(args, kwargs),
        )
        for meter in self.meters.values():
            meter.router_called(call)

    def _experts_ran(self, choices: Choices, outputs: Tensor) -> None:
        norms = torch.cat([as_float64(part).norm(dim=-1) for part in outputs.split(CHUNK)])
        for meter in self.meters.values():
            meter.experts_ran(choices, norms, outputs)

    def on_layer_output(self, hidden: Tensor) -> None:
        """Take the batch's hidden states [B, L, H] behind the decoder layer."""
        for meter in self.meters.values():
            meter.on_layer_output(hidden)

    def finish(self) -> LayerStatistics:
        """Stop observing, compute the dense statistics, and freeze."""
        self.detach()
        if self.infinite:
            raise CompressionError(
                f"{self.layer.name}: its inputs are not finite on the calibration data; try "
                "--dtype float32"
            )
        by_source = self.tokens.tolist()
        tokens = sum(by_source)
        samples = [meter for meter in self.meters.values() if isinstance(meter, Sample)]
        if samples and tokens and not any(meter.parts for meter in samples):
            logger.warning(
                "%s: its experts see other tokens than the calibration's, so samples of them are "
                "empty",
                self.layer.name,
            )
        whole = sum(self.shares)
        scales = [
            share / whole * tokens / max(seen, 1)
            for share, seen in zip(self.shares, by_source, strict=True)
        ]
        values = {}
        for name, meter in self.meters.items():
            meter.combine(scales)
            values[name] = meter.finish()
        seed = self.observed.seed
        sources = []
        for source, seen in enumerate(by_source):
            if seen and len(by_source) > 1:
                alone = {
                    name: meter.of_source(source)
                    for name, meter in self.meters.items()
                    if meter not in samples
                }
                sources.append(LayerStatistics(self.layer, seen, alone, seed))
        return LayerStatistics(self.layer, tokens, values, seed, tuple(sources))


def smaller_routers(architecture: Architecture) -> Routers:
    """Return a function that returns a layer's router in a model with fewer experts, built once, on
    meta."""
    built = cache(lambda count: build_meta(architecture.with_experts(count), torch.float32))
    return lambda layer, count: built(count).get_submodule(layer.router)


class CalibrationCollector(Collector):
    """Observes one layer on the calibration's batches; those that are held out are not observed."""

    def __init__(
        self,
        model: OpenModel,
        layer: MoeLayer,
        needs: frozenset[str],
        calibration: Calibration,
        routers: Routers,
        seed: int,
    ) -> None:
        self.calibration = calibration
        self.rows: dict[int, Tensor] = {}  # the sampled tokens of each batch
        batches = defaultdict(list)
        for number in calibration.fit:
            batches[calibration.source_of(number)].append(number)
        for source, numbers in batches.items():
            sizes = [calibration.batches[number].numel() for number in numbers]
            sampled = calibration.sample_tokens
            count = sum(sizes) if sampled is None else round(sampled * calibration.weights[source])
            is_sampled = torch.zeros(sum(sizes), dtype=torch.bool)
            is_sampled[sample_positions(sum(sizes), count, seed)] = True
            for number, part in zip(numbers, is_sampled.split(sizes), strict=True):
                self.rows[number] = part.nonzero()[:, 0]
        shares = [
            weight if source in batches else 0.0
            for source, weight in enumerate(calibration.weights)
        ]
        super().__init__(layer, model.partial.model, needs, seed, partial(routers, layer), shares)

    def enter(self, batch: int) -> None:
        """Observe the batch of this number, which is about to run."""
        self.detach()
        if batch in self.rows:
            tokens = self.calibration.batches[batch]
            self.observe(tokens, self.rows[batch], batch, self.calibration.source_of(batch))

    def finish(self) -> LayerStatistics:
        """Return the statistics of the layer: of all batches on the first rank, and without values
        on others."""
        self.detach()
        if not ranks().is_alone:
            self.infinite = ranks().all_reduce(self.infinite.cpu())
            self.tokens = ranks().all_reduce(self.tokens)
            for meter in self.meters.values():
                meter.all_reduce()
            if not ranks().is_first:
                return LayerStatistics(self.layer, seed=self.observed.seed)
        return super().finish()


def collect(
    model: OpenModel,
    needs: frozenset[str],
    calibration: Calibration | None,
    progress: Progress,
    seed: int = 0,
    end: LayerVisitor | None = None,
    along: Sequence[LayerVisitor] = (),
    finishing: Sequence[Tensor] = (),
    others: Sequence[Calibration] = (),
) -> Iterator[LayerStatistics]:
    """Yield the statistics of every MoE layer in order, valid until the next one; one layer is in
    memory at a time.

    Those of each of the `others` follow, layer by layer: of the same batches, none of them observed
    twice.

    Needs that are met by weights alone load the experts and run nothing. With a visitor `end` the
    batches go on to the model's output; others go `along`. This rank's `finishing` batches follow
    the calibration's and reach the output."""
    routers = smaller_routers(model.architecture)
    if calibration is None:
        if needs - WEIGHTS:
            raise CompressionError("this strategy needs calibration data; pass --calibration")
        layers = model.architecture.layers
        if not ranks().is_first:
            yield from (LayerStatistics(layer, seed=seed) for layer in layers)
            return
        progress.start("plan", len(layers))
        inner = model.partial
        for layer in layers:
            keys = [tensor.key for tensor in layer.tensors]
            inner.load(key for key in keys if key.startswith(f"{layer.name}."))
            try:
                yield Collector(layer, inner.model, needs, seed, partial(routers, layer)).finish()
            finally:
                inner.release(layer.block)
                give_back()
            progress.advance(layer.name)
        return
    watching = _Watching(
        lambda layer: [
            CalibrationCollector(model, layer, needs, text, routers, seed)
            for text in (calibration, *others)
        ]
    )
    visitors = [watching, *along] if end is None else [watching, end, *along]
    batches = (*calibration.batches, *finishing)
    more = range(len(calibration.batches), len(batches))
    run = Pass(
        model,
        batches,
        progress,
        "calibrate and plan",
        seed,
        to_end=end is not None,
        finishing=more,
        share={*ranks().share(calibration.batches), *more},
    )
    with closing(run.layers(*visitors)) as passed:
        try:
            for _ in passed:
                for collector in watching.active:
                    yield collector.finish()
                watching.active = []  # before their layer's memory is given back
        finally:
            for collector in watching.active:
                collector.detach()


class _Watching(LayerVisitor):
    def __init__(self, collectors_of: Callable[[MoeLayer], list[CalibrationCollector]]) -> None:
        self.collectors_of = collectors_of
        self.active = list[CalibrationCollector]()

    def on_layer_loaded(self, decoder_layer: str) -> None:
        self.active = []
        for layer in self.at.moe_layers:
            self.active += self.collectors_of(layer)

    def on_batch_start(self, batch: int) -> None:
        # all of them first, as hooks of one layer have to go in the reverse of their order
        for collector in self.active:
            collector.detach()
        for collector in self.active:
            collector.enter(batch)

    def on_layer_output(self, output: Any) -> None:
        for collector in self.active:
            collector.on_layer_output(hidden_of(output))
