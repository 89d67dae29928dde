"""What a report measures: how alike the source's experts are, who visits them, and what compression cost each layer.

Source and output run over a part of the calibration text, a layer of each at a time. Source and text are found by the
record of the run, unless they are named; what cannot be had is left out, with a sentence that says so.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.calibration.batches import Calibration, calibrate, load_tokenizer, recalibrate
from compressor.calibration.sources import DEMO_SOURCE, divide, is_file, parse_sources, without_folders
from compressor.checkpoint.source import ModelSource, is_local, locate
from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model.opened import DTYPES, OpenModel, open_model
from compressor.planning.request import DEFAULT_LENGTH
from compressor.plans.plan import CompressionPlan, check_against
from compressor.progress import Progress, Silent
from compressor.report.data import FORMAT, LayerMeasures, Measured, read_compression
from compressor.report.measuring_experts import Likeness, compared_by_weights, likeness_of, sample_size, wanted_keys
from compressor.report.measuring_pass import measure_layers
from compressor.report.store import keep, kept
from compressor.run_record import RunRecord, digest_of, read_record, versions

logger = logging.getLogger(__name__)

TOKENS = 16_384  # of the calibration text, unless more are asked for: less than a calibration reads


@dataclass(frozen=True, slots=True)
class _Text:
    """Batches of token ids [B, L], and the name of their text without folders."""

    name: str
    batches: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        return sum(batch.numel() for batch in self.batches)


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
    plan, record, listener = read_compression(folder)[1], read_record(folder), progress or Silent()
    named = None if model is None else locate(model, revision, listener)
    source = _source(folder, plan, record, named, (dtype, device), listener)
    output = _output(folder, source, (dtype, device))
    missing = [] if source else [_without_source(plan)]
    text = None
    beside = source or output
    if beside is not None:
        text = _text(beside, plan, record, calibration, samples, sequence_length)
    if text is None:
        missing.append(_without_text(plan))
    if output is None:
        missing.append(f"{folder.name} holds no weights that can be run, so neither visits nor errors are measured.")
    key = _key(folder, source, output, text)
    if (known := kept(key)) is not None:
        return replace(known, text=text.name if text else None, missing=tuple(missing))
    found = _measured(plan, source, output, text, listener)
    keep(key, found)
    return replace(found, missing=tuple(missing))


def _measured(
    plan: CompressionPlan, source: OpenModel | None, output: OpenModel | None, text: _Text | None, progress: Progress
) -> Measured:
    plans = {layer.module: layer for layer in plan.layers}

    @cache
    def likeness(module: str) -> Likeness:
        return likeness_of(plan, plans[module])

    if text is not None and output is not None:
        layers = tuple(measure_layers(output, source, text.batches, likeness, progress, plan.seed))
        return Measured(layers, text.tokens, text.name)
    return Measured(() if source is None else _by_weights(source, likeness, progress))


def _by_weights(
    source: OpenModel, likeness: Callable[[str], Likeness], progress: Progress
) -> tuple[LayerMeasures, ...]:
    """What the source's weights alone tell, a layer at a time."""
    layers, partial = source.architecture.layers, source.partial
    progress.start("measure", len(layers))
    found = []
    for layer in layers:
        partial.load(wanted_keys(likeness(layer.name), layer))
        similarity, label = compared_by_weights(likeness(layer.name), layer, partial.model)
        found.append(LayerMeasures(layer.name, similarity, label))
        partial.release(layer.block)
        give_back()
        progress.advance(layer.name)
    return tuple(found)


def _source(
    folder: Path,
    plan: CompressionPlan,
    record: RunRecord | None,
    named: ModelSource | None,
    how: tuple[str, str],
    progress: Progress,
) -> OpenModel | None:
    """The source model, opened; None if it is not named and not to be found, or is no longer what it was."""
    if named is not None:
        return _checked(open_model(named, *how), plan, folder)
    name, commit = (record.source, record.revision) if record else (plan.source.model, plan.source.revision)
    if commit is None and (record is None or not Path(name).is_dir()):
        return None
    if commit is not None and is_local(name):  # a folder here that happens to be called like the Hub's model
        return None
    try:
        return _checked(open_model(locate(name, commit, progress), *how), plan, folder)
    except (CompressionError, OSError) as error:
        logger.debug("the source of %s cannot be had: %s", folder, error)
        return None


def _checked(model: OpenModel, plan: CompressionPlan, folder: Path) -> OpenModel:
    if model.fingerprint != plan.source.fingerprint:
        raise CompressionError(
            f"{model.source.name} is not the model that {folder} was made from: its fingerprint is "
            f"{model.fingerprint[:12]}, not {plan.source.fingerprint[:12]}; name the original with --model"
        )
    check_against(plan, model.architecture.layers, model.fingerprint)
    return model


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
    plan: CompressionPlan,
    record: RunRecord | None,
    calibration: Sequence[str] | None,
    samples: int | None,
    sequence_length: int | None,
) -> _Text | None:
    """The text to run: one that is named, or a part of the plan's own, which must give the same tokens as it did."""
    if calibration is not None:
        sources = parse_sources(calibration)
        length = DEFAULT_LENGTH if sequence_length is None else sequence_length
        wanted = samples or max(len(sources), TOKENS // max(length, 1))
        made = calibrate(
            sources, load_tokenizer(model.source.folder), samples=wanted, length=length, seed=plan.seed,
            vocab=model.vocabulary,
        )  # fmt: skip
        return _Text(without_folders(made.identity)["source"], made.batches)
    identity = _identity(plan, record)
    if identity is None:
        return None
    try:
        made = recalibrate(identity, load_tokenizer(model.source.folder), model.vocabulary)
    except (CompressionError, OSError) as error:
        logger.debug("the calibration text cannot be had: %s", error)
        return None
    return _Text(without_folders(made.identity)["source"], part_of(made, samples))


def _identity(plan: CompressionPlan, record: RunRecord | None) -> Mapping[str, Any] | None:
    """What repeats the plan's calibration: the record's, which knows folders, or the plan's own if that needs none."""
    own = plan.calibration
    if own is None:
        return None
    recorded = record.calibration if record else None
    if recorded is not None and recorded.get("sha256") == own.get("sha256"):
        return recorded
    stored = own.get("sources")
    names = [entry.get("source") for entry in stored if isinstance(entry, dict)] if isinstance(stored, list) else []
    return own if names and all(name == DEMO_SOURCE or is_file(str(name)) for name in names) else None


def part_of(calibration: Calibration, samples: int | None = None) -> tuple[Tensor, ...]:
    """The first sequences of each source, by its weight: `samples` in all, or as many as 16,384 tokens fill."""
    batches = calibration.batches
    length = max(batch.shape[1] for batch in batches)
    present = sorted({calibration.source_of(number) for number in range(len(batches))})
    rows = max(len(present), samples or TOKENS // length)
    quota = dict(zip(present, divide(rows, [calibration.weights[source] for source in present]), strict=True))
    found = []
    for number, batch in enumerate(batches):
        source = calibration.source_of(number)
        taken = batch[: quota[source]]
        quota[source] -= len(taken)
        if len(taken):
            found.append(taken)
    return tuple(found)


def _without_source(plan: CompressionPlan) -> str:
    return (
        f"The source model {plan.source.model} is not at hand, so the likeness of its experts, the visits before and "
        "the errors are not measured; name it with --model."
    )


def _without_text(plan: CompressionPlan) -> str:
    if plan.calibration is None:
        return (
            "The plan was made without any text, so neither visits nor errors are measured; name one with "
            "--calibration."
        )
    return (
        f"The calibration text {without_folders(plan.calibration)['source']} is not at hand or has changed, so "
        "neither visits nor errors are measured; name it with --calibration."
    )


def _key(folder: Path, source: OpenModel | None, output: OpenModel | None, text: _Text | None) -> dict[str, Any]:
    """Everything that the measures depend on."""
    batches = () if text is None else text.batches
    models = [
        model and [*map(list, model.checkpoint.stamp()), str(model.partial.dtype), str(model.partial.device)]
        for model in (source, output)
    ]
    return {
        "format": FORMAT,
        "compression": digest_of(folder),
        "source": models[0],
        "output": models[1],
        "text": [[list(batch.shape), _sha256(batch)] for batch in batches],
        "sample": None if source is None else sample_size(source.architecture.experts),
        "versions": versions(),
    }


def _sha256(batch: Tensor) -> str:
    return hashlib.sha256(batch.contiguous().numpy().tobytes()).hexdigest()
