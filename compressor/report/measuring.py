"""What a report measures: how alike the source's experts are, who visits them, and what compression cost each layer.

Source and output run over a part of the calibration text, a layer of each at a time. Source and text are found by the
record of the run, unless they are named. What cannot be had is taken from what the run itself kept, or left out with a
sentence that says so. What was measured last, and what a run of `compress` sees anyway, is kept in the user's cache.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import is_local, locate
from compressor.data.batches import Calibration, calibrate, load_tokenizer, repeat_text
from compressor.data.sources import DEMO_SOURCE, divide, is_file, parse_sources, without_folders
from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model.architecture import MoeLayer
from compressor.model.opened import DTYPES, OpenModel, open_model
from compressor.pipeline.outcome import read_outcome
from compressor.progress import Progress, Silent
from compressor.recipe.plan import LayerPlan
from compressor.recipe.registry import Strategy, load_strategy
from compressor.recipe.step import DEFAULT_LENGTH
from compressor.recipe.steps_plan import Plan
from compressor.records import plain_json, read_as
from compressor.report.data import FORMAT, LayerMeasures, Measured
from compressor.report.measuring_pass import Likeness, compared, likeness_of, measure_layers, own_likeness, shares
from compressor.run_record import RunRecord, cache_folder, digest_of, read_cached, read_record, versions, write_cached
from compressor.statistics.statistics import WEIGHTS, Collector, LayerStatistics
from compressor.steps.split.opening import as_planned
from compressor.surgery.job import check_plan

logger = logging.getLogger(__name__)

TOKENS = 16_384  # of the calibration text, unless more are asked for: less than a calibration reads


@dataclass(frozen=True, slots=True)
class _AtHand:
    """What there is of an output and its source, and what the run that made it noted."""

    folder: Path
    plan: Plan
    source: OpenModel | None
    output: OpenModel | None
    text: Calibration | None
    noted: Measured

    def measured(self, progress: Progress) -> Measured:
        """Measure all that can be; what the run noted stands for the rest."""
        found, tokens, name = iter(self.noted.layers), self.noted.tokens, self.noted.text
        if self.text is not None and self.output is not None:
            batches, tokens, name = self.text.batches, self.text.tokens, _name(self.text.identity)
            found = measure_layers(self.output, self.source, batches, self._likeness(), progress, self.plan.seed)
            if self.source is None and any(layer.visits_before for layer in self.noted.layers):
                name += f" (visits before: {self.noted.tokens:,} tokens, as the run itself counted them)"
        elif self.source is not None:
            found = by_weights(self.source, self._likeness(), progress)
        noted = {layer.module: layer for layer in self.noted.layers}
        layers = []  # what was measured, and beside it what the run noted of the rest
        for layer in found:
            known = {e.name: value for e in fields(layer) if (value := getattr(layer, e.name)) not in (None, "")}
            layers.append(replace(noted.get(layer.module, layer), **known))
        measured = {layer.module for layer in layers}
        layers += [layer for module, layer in noted.items() if module not in measured]  # those of heads
        return Measured(tuple(layers), tokens, name, tuple(self._missing()))

    def _likeness(self) -> Callable[[str], Likeness]:
        """How each layer's experts are compared, by its module; what the run has noted is told again."""
        planned = {layer.module: layer for layer in self.plan.stage.layers}
        known = {layer.module: layer for layer in self.noted.layers if layer.similarity is not None}

        @cache
        def likeness(module: str) -> Likeness:
            if module not in known:
                return likeness_of(self.plan.stage, planned.get(module))
            label, table = known[module].similarity_label, torch.tensor(known[module].similarity, dtype=torch.float64)
            return Likeness(frozenset(), lambda stats: (label, table))

        return likeness

    def _missing(self) -> Iterator[str]:
        """A sentence for whatever is not at hand."""
        plan, beyond = self.plan, " beyond what the run noted" if self.noted.tokens else ""
        visits = f"so neither visits nor errors are measured{beyond}"
        if self.source is None:
            yield (
                f"The source model {plan.source.model} is not at hand, so the likeness of its experts, the visits "
                f"before and the errors are not measured{beyond}; name it with --model."
            )
        if self.text is None and plan.calibration is None:
            yield f"The plan was made without any text, {visits}; name one with --calibration."
        elif self.text is None and plan.calibration is not None:
            text = f"The calibration text {_name(plan.calibration)} is not at hand or has changed"
            yield f"{text}, {visits}; name it with --calibration."
        if self.output is None:
            yield f"{self.folder.name} holds no weights that can be run, {visits}."

    def key(self) -> str:
        """A digest of everything that the measures depend on, the output folder's own files excepted."""
        models = [
            model and [*map(list, model.checkpoint.stamp()), str(model.partial.dtype), str(model.partial.device)]
            for model in (self.source, self.output)
        ]
        text = self.text and [_name(self.text.identity), *(batch.tolist() for batch in self.text.batches)]
        facts = [FORMAT, models, text, plain_json(self.noted), versions()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


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
    """Measure an output folder against its source on calibration text; what is not at hand is told in `missing`.

    `model` and `calibration` default to what the run that made the output used. `samples` sequences run, by default as
    many as 16,384 tokens fill; `sequence_length` is that of a text named here. The result is kept in the user's cache
    and taken from there while nothing has changed.
    """
    if samples is not None and samples < 1:
        raise CompressionError(f"--samples {samples} leaves nothing to run; give at least 1")
    if model is None and revision is not None:
        raise CompressionError("--revision is that of the model that --model names; give both")
    plan, record, listener = read_outcome(folder).plan, read_record(folder), progress or Silent()
    source = _source(folder, plan, record, (model, revision), (dtype, device), listener)
    output = _output(folder, source, (dtype, device))
    text = None
    if (beside := source or output) is not None:
        text = _text(beside, plan, record, calibration, samples, sequence_length)
    own = kept_measures(folder, "run") if calibration is None and dtype == "auto" else None
    hand = _AtHand(folder, plan, source, output, text, own or Measured(()))
    if (found := kept_measures(folder, "report", hand.key())) is None:
        found = hand.measured(listener)
        keep_measures(folder, found, "report", hand.key())
    return found


def by_weights(source: OpenModel, likeness: Callable[[str], Likeness], progress: Progress) -> Iterator[LayerMeasures]:
    """What the source's weights alone tell, a layer at a time."""
    layers, partial = source.architecture.layers, source.partial
    progress.start("measure", len(layers))
    for layer in layers:
        needs = likeness(layer.name).needs
        whole = needs == WEIGHTS  # otherwise the router's tensors do
        partial.load(tensor.key for tensor in layer.tensors if whole or not tensor.key.startswith(f"{layer.name}."))
        stats = Collector(layer, partial.model, needs & WEIGHTS, 0).finish(None)
        yield LayerMeasures(layer.name, *compared(likeness(layer.name), stats, partial.model))
        partial.release(layer.block)
        give_back()
        progress.advance(layer.name)


def _source(
    folder: Path,
    plan: Plan,
    record: RunRecord | None,
    named: tuple[str | None, str | None],
    how: tuple[str, str],
    progress: Progress,
) -> OpenModel | None:
    """The source model, opened; None if it is not named and not to be found, or is no longer what it was."""

    def checked(name: str, commit: str | None) -> OpenModel:
        model = open_model(locate(name, commit, progress), *how)
        if model.fingerprint != plan.source.fingerprint:
            raise CompressionError(
                f"{model.source.name} is not the model that {folder} was made from: its fingerprint is "
                f"{model.fingerprint[:12]}, not {plan.source.fingerprint[:12]}; name the original with --model"
            )
        model = as_planned(model, plan.stage)
        if plan.stage.layers:
            check_plan(plan.stage, model)
        return model

    if named[0] is not None:
        return checked(named[0], named[1])
    name, commit = (record.source, record.revision) if record else (plan.source.model, plan.source.revision)
    if commit is None and (record is None or not Path(name).is_dir()):
        return None
    if commit is not None and is_local(name):  # a folder here that happens to be called like the Hub's model
        return None
    try:
        return checked(name, commit)
    except (CompressionError, OSError) as error:
        logger.debug("the source of %s cannot be had: %s", folder, error)
        return None


def _output(folder: Path, source: OpenModel | None, how: tuple[str, str]) -> OpenModel | None:
    """The compressed model, opened in the dtype that the source is computed in; None if it has no weights here."""
    dtype, device = how
    if source is not None:
        same = str(source.partial.dtype).removeprefix("torch.")
        dtype, device = (same if same in DTYPES else dtype), str(source.partial.device)
    try:
        return open_model(locate(str(folder)), dtype, device)
    except CompressionError as error:
        logger.debug("%s cannot be run: %s", folder, error)
        return None


def _text(
    model: OpenModel,
    plan: Plan,
    record: RunRecord | None,
    named: Sequence[str] | None,
    samples: int | None,
    sequence_length: int | None,
) -> Calibration | None:
    """The text to run: one that is named, or a part of the plan's own, which must give the same tokens as it did."""
    if named is not None:
        sources = parse_sources(named)
        length = DEFAULT_LENGTH if sequence_length is None else sequence_length
        wanted = samples or max(len(sources), TOKENS // max(length, 1))
        return calibrate(
            sources,
            load_tokenizer(model.source.folder),
            samples=wanted,
            length=length,
            seed=plan.seed,
            vocab=model.vocabulary,
        )
    try:
        identity = _identity(plan, record)
        made = identity and repeat_text(identity, load_tokenizer(model.source.folder), model.vocabulary).fit
    except (CompressionError, OSError) as error:
        logger.debug("the calibration text cannot be had: %s", error)
        return None
    return Calibration(part_of(made, samples), made.identity) if made and made.batches else None


def _identity(plan: Plan, record: RunRecord | None) -> Mapping[str, Any] | None:
    """What repeats the plan's calibration: the record's, which knows folders, or the plan's own if that needs none."""
    own, recorded = plan.calibration, record.calibration if record else None
    if own is None or (recorded is not None and recorded.get("sha256") == own.get("sha256")):
        return own and recorded
    stored = own.get("sources")
    names = [entry.get("source") for entry in stored if isinstance(entry, dict)] if isinstance(stored, list) else []
    return own if names and all(name == DEMO_SOURCE or is_file(str(name)) for name in names) else None


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
        write_cached(_path(folder, by), {**_facts(folder), "key": key, "measured": plain_json(measured)})


def kept_measures(folder: Path, by: By = "report", key: str | None = None) -> Measured | None:
    """What was measured last, unless the weights or the key, if one is given, are others; None if nothing was."""
    path, wanted = _path(folder, by), _facts(folder) | ({} if key is None else {"key": key})
    content = read_cached(path)
    try:
        fits = content is not None and all(content[name] == value for name, value in wanted.items())
        return read_as(Measured, content["measured"]) if content is not None and fits else None
    except (KeyError, CompressionError) as error:
        logger.debug("the measures in %s are ignored: %s", path, error)
        return None


def _path(folder: Path, by: By) -> Path:
    return cache_folder("reports") / f"{by}-{digest_of(folder)}.json"


def _facts(folder: Path) -> dict[str, Any]:
    """Name, size and time of change of each weight file; none of a folder with a graph alone."""
    try:
        return {"weights": [list(entry) for entry in Checkpoint(folder).stamp()]}
    except (CompressionError, OSError):
        return {"weights": []}


class Noted:
    """Notes of a run: visits of the source from its plan's statistics, each calibration source by its weight; how alike
    experts are by the strategy's own likeness; visits of the smaller layers that a correction lets all batches pass.
    """

    def __init__(self) -> None:
        self.layers: dict[str, LayerMeasures] = {}
        self.tokens = 0  # that were seen, held-out ones excepted

    def planning(self, strategy: Strategy) -> Strategy:
        """The strategy; what it plans a layer by is noted."""

        def plan(stats: LayerStatistics, *more: Any) -> LayerPlan:
            made = strategy.plan(stats, *more)
            try:
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    self._planned(stats, strategy, made)
            except Exception as error:  # of a plugin: a report asks it again, and tells
                logger.debug("%s: nothing is noted for reports: %s", stats.layer.name, error)
            return made

        return replace(strategy, plan=plan)

    def _planned(self, stats: LayerStatistics, strategy: Strategy, made: LayerPlan) -> None:
        if "routed_count" in stats.values:
            self._note(stats.layer, stats.tokens, visits_before=shares(stats.routed_count))
        won = made.figures.get("won")  # by a strategy that tries several, each with its default options
        own = own_likeness(strategy if won is None else load_strategy(str(won)))
        if own and own.needs <= set(stats.values) and (found := own.tell(stats)):
            self._note(stats.layer, stats.tokens, similarity=found[0], similarity_label=found[1])

    def visited(self, layer: MoeLayer, counts: Tensor, tokens: int) -> None:
        """Note how many of so many tokens chose each expert [N] of a layer that is smaller now."""
        self._note(layer, tokens, visits_after=shares(counts))

    def _note(self, layer: MoeLayer, tokens: int, **found: Any) -> None:
        self.tokens = max(self.tokens, tokens)
        self.layers[layer.name] = replace(self.layers.get(layer.name, LayerMeasures(layer.name)), **found)

    def keep(self, folder: Path, calibration: Mapping[str, Any] | None) -> None:
        """Keep the notes, with the name of their text, for reports on the output in a folder."""
        text = _name(calibration) if calibration else None
        keep_measures(folder, Measured(tuple(self.layers.values()), self.tokens, text), "run")
