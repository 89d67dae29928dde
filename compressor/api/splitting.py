"""The Python API that makes finer experts: `split`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.api.repeating import answers, note_request, request_key, tell_in_place
from compressor.api.rewriting import refuse_places
from compressor.calibration.batches import Calibration, calibrate, load_tokenizer
from compressor.calibration.sources import parse_sources
from compressor.errors import CompressionError
from compressor.locking import alone
from compressor.model.carried import check_carried
from compressor.model.served import served_model, warn_of_servers
from compressor.planning.registry import load_exporter
from compressor.planning.run import Run, open_run
from compressor.plans.json import refuse_floods
from compressor.progress import Progress
from compressor.records import read_object
from compressor.run_record import COMPRESSION, RunRecord, record_run, versions
from compressor.splitting.exact import factors_of
from compressor.splitting.job import split_job, split_plan
from compressor.splitting.neurons import measured
from compressor.splitting.order import CLUSTERS, ENERGY, WAYS, digest_of_orders, order_of
from compressor.splitting.shape import SplitShape, split_shape
from compressor.surgery.kept import keep_tensors, kept_tensors, told_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SplitSummary:
    """What a split did, for a person or a script."""

    out: str
    parts: int
    by: str
    experts_before: int
    experts_after: int
    top_k_before: int
    top_k_after: int
    width_before: int
    width_after: int
    seconds: Mapping[str, float]


def split(
    model: str,
    out: str | Path,
    parts: int,
    *,
    data: str | Sequence[str] = (),
    by: str = ENERGY,
    samples: int = 128,
    sequence_length: int = 512,
    seed: int = 0,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
    command: Sequence[str] | None = None,
) -> SplitSummary:
    """Write `model` with each routed expert as `parts` narrower ones that compute the same function.

    With `data` the parts of an expert take its neurons by falling energy on that text, or `by` clusters of neurons
    that fire together; without, by the norms of their weights. Where the output of this very request is in place
    already, nothing is written. Raises `CompressionError` for an architecture that cannot be split exactly, a number
    of parts that the width is not divisible by, and for clusters without data.
    """
    place, sources = Path(out), parse_sources([data] if isinstance(data, str) else data) if data else ()
    _check_way(by, bool(sources))
    if sources:
        refuse_floods(samples, sequence_length)
    with open_run(model, revision, dtype, device, progress) as run:
        with run.clock.phase("open"):
            shape = split_shape(run.model.architecture, parts)
            asked = {"parts": parts, "by": by if sources else "weights"}
            refuse_places(place, (run.model,))
            check_carried(run.model.source.folder)
            text = None
            if sources:
                tokenizer, vocabulary = load_tokenizer(run.model.source.folder), run.model.vocabulary
                text = calibrate(
                    sources, tokenizer, samples=samples, length=sequence_length, seed=seed, vocab=vocabulary
                )
            facts = (run.model.checkpoint.stamp(), str(run.model.partial.device), str(run.model.partial.dtype))
            told = None if text is None else text.identity
            key = request_key("split", asked, told, seed, max_shard_bytes, versions(), *facts)
        with alone(place) as folder:
            if not overwrite and answers(place, key):
                tell_in_place(place)
                return _summary(run, shape, str(place))
            kept = folder / f"split-{key[:16]}.safetensors"
            try:
                _write(run, shape, asked, text, place, key, kept, (seed, overwrite, max_shard_bytes))
            except Exception:
                load_exporter("safetensors").discard(place)
                raise
        words, seconds = None if command is None else tuple(command), dict(run.clock.seconds)
        source = run.model.source
        record_run(place, RunRecord(source.name, source.revision, told, seconds, run.peak.anonymous, words))
        return _summary(run, shape, str(place))


def _check_way(by: str, with_data: bool) -> None:
    if by not in WAYS:
        raise CompressionError(f"there is no --split-by {by!r}; known are {', '.join(WAYS)}")
    if by == CLUSTERS and not with_data:
        raise CompressionError("--split-by clusters needs text on which neurons fire; give it by --data")


def _write(
    run: Run,
    shape: SplitShape,
    asked: Mapping[str, Any],
    text: Calibration | None,
    place: Path,
    key: str,
    kept: Path,
    terms: tuple[int, bool, int | None],
) -> None:
    """Find out how to split, order the neurons, and write the output; orders that a killed run has `kept` are taken."""
    seed, overwrite, max_shard_bytes = terms
    model, writer = run.model, load_exporter("safetensors")
    writer.check_target(place, overwrite)
    writer.check_space(place, sum(info.nbytes for info in model.checkpoint.tensors.values()))
    with run.clock.phase("check"):
        factors = factors_of(model.architecture, shape)
    if model.layout.quantized:
        logger.warning("%s is stored quantised; its parts are written in a plain dtype", model.source.label)
    served, first = served_model(model), shape.architecture.layers[0]
    after = replace(served, experts=first.experts, top_k=first.top_k, width=shape.width, quantization="")
    warn_of_servers(served, after, shape.architecture.layers)
    with run.clock.phase("measure"):
        orders = _orders(run, shape.parts, asked["by"], text, seed, kept)
    entry = {
        **asked,
        "experts": model.architecture.experts,
        "output_factor": factors.output,
        "selection_factor": factors.selection,
        "order_sha256": digest_of_orders(orders.items()),
        "calibration": None if text is None else text.identity,
    }
    job = split_job(model, shape, factors, orders, split_plan(model, shape, entry, seed), max_shard_bytes)
    check = job.verify

    def verify(folder: Path) -> None:
        check(folder)
        note_request(folder, key)

    with run.clock.phase("write"):
        run.progress.start("write", len(job.units))
        writer.write(
            replace(job, verify=verify),
            place,
            overwrite,
            lambda unit, _: run.progress.advance(unit or "embeddings and head"),
        )


def _orders(run: Run, parts: int, by: str, text: Calibration | None, seed: int, kept: Path) -> dict[str, Tensor]:
    """The order of every layer's neurons [E, I], by its name."""
    if told_of(kept) is not None:
        return kept_tensors(kept)
    way = CLUSTERS if by == CLUSTERS else ENERGY
    found = measured(run.model, text, run.progress, way == CLUSTERS, seed)
    orders = {neurons.layer.name: order_of(neurons, parts, way, seed) for neurons in found}
    keep_tensors(kept, orders, {"by": by})
    return orders


def _summary(run: Run, shape: SplitShape, out: str) -> SplitSummary:
    before, after = run.model.architecture, shape.architecture
    said = read_object(Path(out) / COMPRESSION)["plan"]["split"]
    return SplitSummary(
        out, shape.parts, said["by"], before.experts, after.experts, before.layers[0].top_k, after.layers[0].top_k,
        shape.width * shape.parts, shape.width, dict(run.clock.seconds),
    )  # fmt: skip
