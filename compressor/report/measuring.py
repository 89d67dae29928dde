"""Measurements of a report: the similarity of the base's experts, their routed tokens, and each
layer's error.

Output and base run over a part of the calibration text, one after the other. While the base passes
a layer, the output's MoE block also runs on the input of the base's block, so that corrections and
merged routers count as they are stored. No more than one layer of each is in memory. T tokens, E
experts, H hidden, S sampled tokens.

Base and text are found by the record of the run, unless they are named. What is not available is
left out with a sentence that says so.

Figure 2 of Zhang et al. 2024, arXiv:2407.09590, shows such matrices. Linear CKA (Kornblith et al.
2019, arXiv:1905.00414) stands in where a strategy compares no experts."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.source import ModelSource, locate
from compressor.data.batches import Calibration, calibrate, repeat_text
from compressor.data.sources import divide, parse_sources, without_folders
from compressor.devices import as_float64
from compressor.errors import CompressionError, reason_of
from compressor.files import is_local
from compressor.frozen import frozen
from compressor.model.experts import moe_hooks
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import DTYPES, OpenModel, open_model
from compressor.model.streaming import LayerVisitor, hidden_of
from compressor.model.tokenizer import load_tokenizer
from compressor.pipeline.outcome import read_outcome
from compressor.progress import Progress, Silent
from compressor.recipe.registry import load_strategy
from compressor.recipe.step import DEFAULT_LENGTH
from compressor.recipe.steps_plan import Plan
from compressor.report.data import LayerMeasures, Matrix, Measured
from compressor.report.speed import measure_speed
from compressor.run_record import RunRecord, read_record, record_run
from compressor.statistics.statistics import WEIGHTS, LayerStatistics, collect
from compressor.steps.job import check_plan
from compressor.steps.prune.similarity import linear_cka
from compressor.steps.split.view import as_decided

logger = logging.getLogger(__name__)

TOKENS = 16_384  # of the calibration text, unless more are asked for: less than a calibration reads
DIGITS = 4  # of a matrix's entries
VISITS = frozenset({"routed_count"})


def measure(
    folder: Path,
    model: str | None = None,
    revision: str | None = None,
    calibration: Sequence[str] | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    progress: Progress | None = None,
    device: str = "auto",
    dtype: str = "auto",
    speed: bool = False,
) -> Measured:
    """Measure an output folder against its base on calibration text; `missing` says what could not
    be measured.

    `model` and `calibration` default to what the run that made the output used. `samples` sequences
    run, by default as many as 16,384 tokens fill; `sequence_length` is that of a text named here.
    `speed` times both models, too."""
    if samples is not None and samples < 1:
        raise CompressionError(f"--samples {samples} leaves nothing to run; give at least 1")
    if model is None and revision is not None:
        raise CompressionError("--revision is that of the model that --model names; give both")
    plan, record, progress = read_outcome(folder).plan, read_record(folder), progress or Silent()
    base = output = text = None
    source = None
    try:
        if model is not None:
            source = locate(model, revision, progress)
        else:
            name, commit = plan.source.model, plan.source.revision
            if record is not None:
                name, commit = record.source, record.revision
            # a folder here may be called like the Hub's model
            is_known = not is_local(name)
            if commit is None:  # without a record, a folder may be another one of its name
                is_known = record is not None and Path(name).is_dir()
            if is_known:
                source = locate(name, commit, progress)
        if source is not None:
            base = _open_base(folder, plan, source, dtype, device)
    except (CompressionError, OSError):
        if model is not None:
            raise
    if base is not None:  # both compute alike
        dtype = base.dtype_name if base.dtype_name in DTYPES else dtype
        device = str(base.partial.device)
    with suppress(CompressionError):  # an output without weights
        output = open_model(locate(str(folder)), dtype, device)
    opened = base or output
    if opened is not None and calibration is None:
        text = _recorded_text(opened, plan, record, samples)
    elif opened is not None and calibration is not None:
        text = read_part(opened, calibration, samples, sequence_length, plan.seed)
    similarity = similarity_of(plan)
    lost = "so routed tokens, errors and similarities of outputs are not measured"
    missing = []
    if base is None:
        missing.append(
            f"The base model {plan.source.model} is not available, so the similarity of its "
            "experts, the routed tokens "
            "before and the errors are not measured; name it with --model."
        )
    if text is None and plan.text is not None:
        name = without_folders(plan.text)["source"]
        missing.append(
            f"The calibration text {name} is not available or has changed, {lost}; name it with "
            "--calibration."
        )
    elif text is None:
        missing.append(f"The plan was made without any text, {lost}; name one with --calibration.")
    if output is None:
        missing.append(f"{folder.name} holds no weights that can be run, {lost}.")
    measured = Measured(missing=tuple(missing))
    if text is not None and output is not None:
        layers = measure_layers(output, base, text.batches, similarity, progress, plan.seed)
        name = str(without_folders(text.identity)["source"])
        measured = replace(measured, layers=tuple(layers), tokens=text.tokens, text=name)
    elif base is not None:
        measured = replace(measured, layers=tuple(by_weights(base, similarity, progress)))
    if speed:
        if text is None or base is None or output is None:
            raise CompressionError(
                "--speed needs base, output and text; name them by --model and --calibration"
            )
        models = base.source, output.source
        timed = measure_speed(
            models, text.batches[0], output.positions, progress, device, output.dtype_name
        )
        if record is not None:
            record_run(folder, replace(record, speed=asdict(timed)))
        measured = replace(measured, speed=timed)
    return measured


def read_part(
    model: OpenModel,
    calibration: Sequence[str],
    samples: int | None,
    length: int | None,
    seed: int = 0,
) -> Calibration:
    """Return `samples` sequences of text, by default as many as 16,384 tokens fill."""
    sources = parse_sources(calibration)
    length = DEFAULT_LENGTH if length is None else length
    wanted = samples or max(len(sources), TOKENS // max(length, 1))
    tokenizer = load_tokenizer(model.source.folder)
    return calibrate(
        sources, tokenizer, samples=wanted, length=length, seed=seed, vocab=model.vocabulary
    )


def _open_base(folder: Path, plan: Plan, source: ModelSource, dtype: str, device: str) -> OpenModel:
    """Open the base as the plan saw it; raise `CompressionError` if it is no longer what it was."""
    opened = open_model(source, dtype, device)
    if opened.fingerprint != plan.source.fingerprint:
        raise CompressionError(
            f"{opened.source.name} is not the model that {folder} was made from: its fingerprint "
            f"is {opened.fingerprint[:12]}, not {plan.source.fingerprint[:12]}; name the base with "
            "--model"
        )
    opened = as_decided(opened, plan.split, plan.expert_plan.top_k)
    if plan.expert_plan.layers:
        check_plan(plan.expert_plan, opened)
    return opened


def _recorded_text(
    model: OpenModel, plan: Plan, record: RunRecord | None, samples: int | None
) -> Calibration | None:
    """Return a part of the plan's own text, which must give the same tokens as it did; None where
    it does not.

    The run's record, which knows folders, repeats it, or the plan itself if that needs none.
    """
    identity = plan.text
    recorded = record.calibration if record else None
    if identity is None:
        return None
    if recorded is not None and recorded.get("sha256") == identity.get("sha256"):
        identity = recorded
    try:
        text = repeat_text(identity, load_tokenizer(model.source.folder), model.vocabulary).fit
    except (CompressionError, OSError):
        return None
    batches = text.batches
    if not batches:
        return None
    # the first sequences of each source, by its weight
    present = sorted({text.source_of(number) for number in range(len(batches))})
    rows = max(len(present), samples or TOKENS // max(batch.shape[1] for batch in batches))
    weights = [text.weights[source] for source in present]
    quota = dict(zip(present, divide(rows, weights), strict=True))
    parts = []
    for number, batch in enumerate(batches):
        source = text.source_of(number)
        part = batch[: quota[source]]
        quota[source] -= len(part)
        if len(part):
            parts.append(part)
    return Calibration(tuple(parts), text.identity)


def shares(counts: Tensor) -> tuple[float, ...]:
    """Each expert's share of the routed tokens: [E] -> E numbers that sum to 1; zeros where there
    are none."""
    return tuple(round(share, 6) for share in (counts / counts.sum().clamp(min=1)).tolist())


def compared_tokens(experts: int) -> int:
    """Return on how many tokens experts are compared.

    CKA by Gram matrices takes S^2 H multiplications for each expert; 4 s for 128 tokens, 256
    experts, width 7168."""
    return 256 if experts <= 64 else 128


@frozen
class Similarity:
    """A way to compare a layer's experts: what it needs measured, and a label with the matrix [E,
    E], 0 to 1."""

    needs: frozenset[str]
    measure: Callable[[LayerStatistics], tuple[str, Tensor]]

    @torch.no_grad()
    def compare(self, stats: LayerStatistics) -> tuple[Matrix | None, str]:
        """The matrix and its label; None without tokens, or where a plugin's own measure fails."""
        if self.needs - WEIGHTS and not stats.tokens:
            return None, ""
        try:
            (label, table), experts = self.measure(stats), stats.layer.experts
            if table.shape != (experts, experts) or not bool(table.isfinite().all()):
                raise CompressionError(
                    f"its strategy gives no matrix of {experts} x {experts} finite numbers"
                )
        except Exception as error:  # of a plugin: a report can do without
            what = (
                "%s: the report lacks the similarity of its experts, which could not be "
                "compared: %s"
            )
            logger.warning(what, stats.layer.name, reason_of(error))
            return None, ""
        values = table.cpu().double().clamp(0, 1).round(decimals=DIGITS).tolist()
        return tuple(map(tuple, values)), str(label)


def similarity_of(plan: Plan) -> Similarity:
    """Return how the plan's strategy compares experts, or linear CKA of their outputs where it does
    not say."""
    with suppress(CompressionError):  # it need not be installed where a report is made
        strategy = load_strategy(plan.strategy, plan.strategy_options)
        measure = strategy.similarity
        options = strategy.options
        if measure is not None:
            return Similarity(strategy.similarity_needs, lambda stats: measure(stats, options))

    def compare(stats: LayerStatistics) -> tuple[str, Tensor]:
        outputs = stats.expert_outputs
        return f"linear CKA of expert outputs, {outputs.shape[1]} tokens", linear_cka(outputs)

    return Similarity(frozenset({"expert_outputs"}), compare)


class _WatchedBlock:
    """One MoE block of the base while batches pass it; the output's block runs on the same input.

    Where the block is the decoder layer itself, the outputs of the experts are compared.
    """

    def __init__(self, layer: MoeLayer, base: Any, output: Any) -> None:
        self.small = output.get_submodule(layer.block)
        self.missed = 0.0  # ||y' - y||^2
        self.energy = 0.0  # ||y||^2
        self.calls = 0
        self.outputs = list[Tensor]()  # of one call: the base's, then the output's
        self.hooks = ExitStack()
        is_decoder_layer = layer.block == layer.decoder_layer

        def on_experts(hidden: Tensor, output: Tensor) -> None:
            if is_decoder_layer:
                self.outputs.append(output)

        def on_block(args: Any, kwargs: Any, output: Any) -> None:
            if not is_decoder_layer:
                self.outputs.append(hidden_of(output))

        def on_base(args: Any, kwargs: Any, output: Any) -> None:
            on_block(args, kwargs, output)
            if self.outputs and self.outputs[0].numel():
                self.small(*args, **kwargs)
                base, ours = [value.detach().float() for value in self.outputs]
                self.missed += float(as_float64((ours - base).square()).sum())
                self.energy += float(as_float64(base.square()).sum())
                self.calls += 1
            self.outputs.clear()

        for model, watch in ((output, on_block), (base, on_base)):
            self.hooks.enter_context(moe_hooks(model, layer, on_output=on_experts, on_block=watch))


class _BlockErrors(LayerVisitor):
    """Compares the output's MoE blocks with the base's, which a pass runs; one decoder layer of
    each is loaded."""

    def __init__(self, output: OpenModel) -> None:
        self.partial = output.partial
        self.watched: dict[str, _WatchedBlock] = {}

    def on_layer_loaded(self, decoder_layer: str) -> None:
        if self.at.moe_layers:
            self.partial.load(self.partial.keys_under(decoder_layer))
        for layer in self.at.moe_layers:
            self.watched[layer.name] = _WatchedBlock(layer, self.at.model, self.partial.model)

    def on_layer_end(self, decoder_layer: str) -> None:
        """Leave both models as they were."""
        for watched in self.watched.values():
            watched.hooks.close()
        self.partial.release(decoder_layer)


def measure_layers(
    output: OpenModel,
    base: OpenModel | None,
    batches: Sequence[Tensor],
    similarity: Similarity,
    progress: Progress,
    seed: int = 0,
) -> Iterator[LayerMeasures]:
    """Yield each MoE layer's measures in order, on token ids [B, L]; without a base, the routed
    tokens after alone."""
    first = base or output
    names = [layer.name for layer in output.architecture.layers]
    same_layers = output.architecture.decoder_layers == first.architecture.decoder_layers
    if names != [layer.name for layer in first.architecture.layers] or not same_layers:
        raise CompressionError(
            f"{first.source.label} and {output.source.label} have different layers, so they are no "
            "base and its output; name the base with --model"
        )
    text = Calibration(
        tuple(batches), {}, sample_tokens=compared_tokens(first.architecture.experts)
    )
    after = [
        LayerMeasures(stats.layer.name, visits_after=shares(stats.routed_count))
        for stats in collect(output, VISITS, text, progress, seed)
    ]
    if base is None:
        yield from after
        return
    errors = _BlockErrors(output)
    try:
        needs = VISITS | similarity.needs
        for measures, stats in zip(
            after, collect(base, needs, text, progress, seed, along=[errors]), strict=True
        ):
            matrix, label = similarity.compare(stats)
            watched = errors.watched[measures.module]
            # the numerator alone where y is zero
            error = watched.missed / (watched.energy or 1.0)
            is_known = watched.calls and math.isfinite(error)
            yield replace(
                measures,
                similarity=matrix,
                similarity_label=label,
                visits_before=shares(stats.routed_count),
                error=float(f"{error:.6g}") if is_known else None,
            )
    finally:
        errors.on_layer_end("")


def by_weights(
    base: OpenModel, similarity: Similarity, progress: Progress
) -> Iterator[LayerMeasures]:
    """The similarity of the base's experts a layer at a time, of their router rows where weights
    alone say no other."""

    def compare(stats: LayerStatistics) -> tuple[str, Tensor]:
        """Cosine of what the router's matrices hold for each expert, less its mean over experts."""
        layer = stats.layer
        dims = {tensor.key.removeprefix(f"{layer.router}."): tensor.dim for tensor in layer.tensors}
        rows = []
        for name, value in stats.weights.router.named_parameters():
            if name in dims and value.dim() > 1:
                row = value.detach().movedim(dims[name], 0)[: layer.experts].flatten(1)
                rows.append(as_float64(row))
        if not rows:
            raise CompressionError("its router has no matrix with a row for each")
        centred = torch.cat(rows, dim=1)
        centred = torch.nn.functional.normalize(centred - centred.mean(dim=0), dim=1)
        cosines = (centred @ centred.T).clamp(0, 1).fill_diagonal_(1)
        return "cosine of the centred router rows, negative ones as 0", cosines

    if not similarity.needs <= WEIGHTS:
        similarity = Similarity(WEIGHTS, compare)
    for stats in collect(base, WEIGHTS, None, progress):
        layer = stats.layer
        base.partial.load(
            tensor.key for tensor in layer.tensors if tensor.key.startswith(f"{layer.router}.")
        )
        yield LayerMeasures(layer.name, *similarity.compare(stats))
        base.partial.release(layer.router)
