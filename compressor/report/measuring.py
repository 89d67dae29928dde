"""What a report measures: the similarity of the base's experts, their routed tokens, and each layer's error.

Base and output run over a part of the calibration text, a layer of each at a time. Base and text are found by the
record of the run, unless they are named. What is not available is taken from what the run itself kept, or left out with
a sentence that says so. What was measured last, and what a run of `compress` sees anyway, is kept in the user's cache.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from os.path import isfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import is_local, locate
from compressor.data.batches import Calibration, calibrate, load_tokenizer, repeat_text
from compressor.data.sources import DEMO_SOURCE, divide, parse_sources, without_folders
from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model.architecture import MoeLayer
from compressor.model.opened import DTYPES, OpenModel, open_model
from compressor.pipeline.outcome import read_outcome
from compressor.progress import Progress, Silent
from compressor.recipe.document import entries
from compressor.recipe.plan import LayerPlan
from compressor.recipe.registry import Strategy, load_strategy
from compressor.recipe.step import DEFAULT_LENGTH
from compressor.recipe.steps_plan import Plan
from compressor.records import plain_json, read_as
from compressor.report.data import FORMAT, LayerMeasures, Measured
from compressor.report.measuring_pass import Similarity, measure_layers, own_similarity, shares, similarity_of
from compressor.run_record import RunRecord, cache_folder, digest_of, read_cached, read_record, versions, write_cached
from compressor.statistics.statistics import WEIGHTS, Collector, LayerStatistics
from compressor.steps.job import check_plan
from compressor.steps.split.opening import as_planned

logger = logging.getLogger(__name__)

TOKENS = 16_384  # of the calibration text, unless more are asked for: less than a calibration reads


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
) -> Measured:
    """Measure an output folder against its base on calibration text; `missing` says what could not be measured.

    `model` and `calibration` default to what the run that made the output used. `samples` sequences run, by default as
    many as 16,384 tokens fill; `sequence_length` is that of a text named here. The result is kept in the user's cache
    and taken from there while nothing has changed.
    """
    if samples is not None and samples < 1:
        raise CompressionError(f"--samples {samples} leaves nothing to run; give at least 1")
    if model is None and revision is not None:
        raise CompressionError("--revision is that of the model that --model names; give both")
    plan, record, progress = read_outcome(folder).plan, read_record(folder), progress or Silent()
    base = _base(folder, plan, record, model, revision, dtype, device, progress)
    output = _output(folder, base, dtype, device)
    text = None
    if (opened := base or output) is not None:
        if calibration is None:
            text = _recorded_text(opened, plan, record, samples)
        else:
            length = DEFAULT_LENGTH if sequence_length is None else sequence_length
            sources, tokenizer = parse_sources(calibration), load_tokenizer(opened.source.folder)
            wanted = samples or max(len(sources), TOKENS // max(length, 1))
            text = calibrate(sources, tokenizer, samples=wanted, length=length, seed=plan.seed, vocab=opened.vocabulary)
    run = (kept_measures(folder, "run") if calibration is None and dtype == "auto" else None) or Measured()
    models = [
        each and [*map(list, each.checkpoint.stamp()), str(each.partial.dtype), str(each.partial.device)]
        for each in (base, output)
    ]
    read = text and [_name(text.identity), *(batch.tolist() for batch in text.batches)]
    facts = [FORMAT, models, read, plain_json(run), versions()]  # all that the measures depend on
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if (kept := kept_measures(folder, "report", key)) is not None:
        return kept
    layers, tokens, name = {layer.module: layer for layer in run.layers}, run.tokens, run.text
    planned = {layer.module: layer for layer in plan.stage.layers}

    @cache
    def similarity(module: str) -> Similarity:
        """How a layer's experts are compared; a matrix that the run kept stands."""
        if module not in layers or layers[module].similarity is None:
            return similarity_of(plan.stage, planned.get(module))
        known = layers[module].similarity_label, torch.tensor(layers[module].similarity, dtype=torch.float64)
        return Similarity(frozenset(), lambda stats: known)

    fresh: Iterator[LayerMeasures] = iter(())
    if text is not None and output is not None:
        tokens, name = text.tokens, _name(text.identity)
        fresh = measure_layers(output, base, text.batches, similarity, progress, plan.seed)
    elif base is not None:
        fresh = by_weights(base, similarity, progress)
    for layer in fresh:  # beside what the run kept
        known = {field: value for field, value in layer.fields().items() if value not in (None, "")}
        layers[layer.module] = replace(layers.get(layer.module, layer), **known)
    missing = tuple(_missing(folder, plan, base, output, text, " beyond what the run recorded" if run.tokens else ""))
    measured = Measured(tuple(layers.values()), tokens, name, missing)
    keep_measures(folder, measured, "report", key)
    return measured


def _missing(
    folder: Path, plan: Plan, base: OpenModel | None, output: OpenModel | None, text: Calibration | None, beyond: str
) -> Iterator[str]:
    lost = f"so routed tokens, errors and similarities of outputs are not measured{beyond}"
    if base is None:
        yield (
            f"The base model {plan.source.model} is not available, so the similarity of its experts, the routed tokens "
            f"before and the errors are not measured{beyond}; name it with --model."
        )
    if text is None and plan.calibration is None:
        yield f"The plan was made without any text, {lost}; name one with --calibration."
    elif text is None and plan.calibration is not None:
        name = _name(plan.calibration)
        yield f"The calibration text {name} is not available or has changed, {lost}; name it with --calibration."
    if output is None:
        yield f"{folder.name} holds no weights that can be run, {lost}."


def by_weights(base: OpenModel, similarity: Callable[[str], Similarity], progress: Progress) -> Iterator[LayerMeasures]:
    """The similarity of the base's experts where its weights alone say it, a layer at a time."""
    layers, partial = base.architecture.layers, base.partial
    progress.start("measure", len(layers))
    for layer in layers:
        needs = similarity(layer.name).needs
        if needs <= WEIGHTS:
            partial.load(tensor.key for tensor in layer.tensors if needs)
            stats = Collector(layer, partial.model, needs, 0).finish(None)
            yield LayerMeasures(layer.name, *similarity(layer.name).compare(stats))
            partial.release(layer.block)
            give_back()
        progress.advance(layer.name)


def _base(
    folder: Path,
    plan: Plan,
    record: RunRecord | None,
    model: str | None,
    revision: str | None,
    dtype: str,
    device: str,
    progress: Progress,
) -> OpenModel | None:
    """The base model, opened; None if it is not named and not to be found, or is no longer what it was."""
    name, commit = model, revision
    if name is None:
        name, commit = (record.source, record.revision) if record else (plan.source.model, plan.source.revision)
        # a folder here may be called like the Hub's model
        if is_local(name) if commit is not None else record is None or not Path(name).is_dir():
            return None
    try:
        opened = open_model(locate(name, commit, progress), dtype, device)
        if opened.fingerprint != plan.source.fingerprint:
            raise CompressionError(
                f"{opened.source.name} is not the model that {folder} was made from: its fingerprint is "
                f"{opened.fingerprint[:12]}, not {plan.source.fingerprint[:12]}; name the base with --model"
            )
        opened = as_planned(opened, plan.stage)
        if plan.stage.layers:
            check_plan(plan.stage, opened)
        return opened
    except (CompressionError, OSError) as error:
        if model is not None:
            raise
        logger.debug("the base of %s cannot be opened: %s", folder, error)
        return None


def _output(folder: Path, base: OpenModel | None, dtype: str, device: str) -> OpenModel | None:
    """The compressed model, opened in the dtype that the base is computed in; None if it has no weights here."""
    if base is not None:
        same = str(base.partial.dtype).removeprefix("torch.")
        dtype, device = (same if same in DTYPES else dtype), str(base.partial.device)
    try:
        return open_model(locate(str(folder)), dtype, device)
    except CompressionError as error:
        logger.debug("%s cannot be run: %s", folder, error)
        return None


def _recorded_text(model: OpenModel, plan: Plan, record: RunRecord | None, samples: int | None) -> Calibration | None:
    """A part of the plan's own text, which must give the same tokens as it did; None where it cannot be read.

    The run's record, which knows folders, repeats it, or the plan itself if that needs none.
    """
    identity, recorded = plan.calibration, record.calibration if record else None
    if identity is None:
        return None
    if recorded is not None and recorded.get("sha256") == identity.get("sha256"):
        identity = recorded
    else:
        names = [entry.get("source") for entry in entries(identity.get("sources"))]
        if not names or not all(name == DEMO_SOURCE or isfile(str(name)) for name in names):
            return None
    try:
        text = repeat_text(identity, load_tokenizer(model.source.folder), model.vocabulary).fit
    except (CompressionError, OSError) as error:
        logger.debug("the calibration text cannot be read: %s", error)
        return None
    return Calibration(part_of(text, samples), text.identity) if text.batches else None


def part_of(calibration: Calibration, samples: int | None = None) -> tuple[Tensor, ...]:
    """The first sequences of each source, by its weight: `samples` in all, or as many as 16,384 tokens fill."""
    batches = calibration.batches
    present = sorted({calibration.source_of(number) for number in range(len(batches))})
    rows = max(len(present), samples or TOKENS // max(batch.shape[1] for batch in batches))
    quota = dict(zip(present, divide(rows, [calibration.weights[source] for source in present]), strict=True))
    found = []
    for number, batch in enumerate(batches):
        taken = batch[: quota[calibration.source_of(number)]]
        quota[calibration.source_of(number)] -= len(taken)
        found += [taken] if len(taken) else []
    return tuple(found)


def _name(identity: Mapping[str, Any]) -> str:
    return str(without_folders(identity)["source"])


By = Literal["run", "report"]


def keep_measures(folder: Path, measured: Measured, by: By, key: str = "") -> None:
    """Remember what was measured of an output as it is now, under a `key` that names what else it depends on.

    Where that cannot be written, nothing is kept.
    """
    if measured.layers:
        path, facts = _cached(folder, by)
        write_cached(path, {**facts, "key": key, "measured": plain_json(measured)})


def kept_measures(folder: Path, by: By = "report", key: str | None = None) -> Measured | None:
    """What was measured last, unless the weights or the key, if one is given, are others; None if nothing was."""
    path, facts = _cached(folder, by)
    content = read_cached(path)
    try:
        fits = content is not None and content["weights"] == facts["weights"] and key in (None, content["key"])
        return read_as(Measured, content["measured"]) if content is not None and fits else None
    except (KeyError, CompressionError) as error:
        logger.debug("the measures in %s are ignored: %s", path, error)
        return None


def _cached(folder: Path, by: By) -> tuple[Path, dict[str, Any]]:
    """The file of an output's measures; name, size and time of change of each weight file, none of a graph alone."""
    try:
        weights = [list(entry) for entry in Checkpoint(folder).stamp()]
    except (CompressionError, OSError):
        weights = []
    return cache_folder("reports") / f"{by}-{digest_of(folder)}.json", {"weights": weights}


class RunStats:
    """What a run computes anyway: the base's routed tokens by its plan's statistics, each calibration source by its
    weight; the similarity of experts, as the strategy measures it; routed tokens of the smaller layers that a
    reconstruction lets all batches pass.
    """

    def __init__(self) -> None:
        self.layers: dict[str, LayerMeasures] = {}
        self.tokens = 0  # that were seen, held-out ones excepted

    def planning(self, strategy: Strategy) -> Strategy:
        """The strategy; what it plans a layer by is recorded."""

        def plan(stats: LayerStatistics, *more: Any) -> LayerPlan:
            made = strategy.plan(stats, *more)
            if "routed_count" in stats.values:
                self._record(stats.layer, stats.tokens, visits_before=shares(stats.routed_count))
            won = made.figures.get("won")  # by a strategy that tries several, each with its default options
            own = own_similarity(strategy if won is None else load_strategy(str(won)))
            if own and own.needs <= set(stats.values):
                with torch.random.fork_rng(devices=[]):
                    matrix, label = own.compare(stats)
                self._record(stats.layer, stats.tokens, similarity=matrix, similarity_label=label)
            return made

        return replace(strategy, plan=plan)

    def visited(self, layer: MoeLayer, counts: Tensor, tokens: int) -> None:
        """Record how many of so many tokens were routed to each expert [N] of a layer that is smaller now."""
        self._record(layer, tokens, visits_after=shares(counts))

    def _record(self, layer: MoeLayer, tokens: int, **found: Any) -> None:
        self.tokens = max(self.tokens, tokens)
        self.layers[layer.name] = replace(self.layers.get(layer.name, LayerMeasures(layer.name)), **found)

    def keep(self, folder: Path, calibration: Mapping[str, Any] | None) -> None:
        """Keep all of it, with the name of the text, for reports on the output in a folder."""
        text = _name(calibration) if calibration else None
        keep_measures(folder, Measured(tuple(self.layers.values()), self.tokens, text), "run")
