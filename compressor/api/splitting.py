"""The Python API that makes finer experts: `split`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compressor.api.repeating import answers, note_request, request_key, tell_in_place
from compressor.api.rewriting import refuse_places
from compressor.data.batches import Calibration, calibrate, load_tokenizer
from compressor.data.sources import parse_sources
from compressor.errors import CompressionError
from compressor.locking import alone
from compressor.model.carried import check_carried
from compressor.planning.run import Run, open_run
from compressor.progress import Progress
from compressor.recipe.plan_json import refuse_floods
from compressor.recipe.registry import load_exporter
from compressor.recipe.split import ENERGY, WEIGHTS
from compressor.recipe.whole import whole_plan
from compressor.records import read_object
from compressor.run_record import COMPRESSION, RunRecord, record_run, versions
from compressor.steps.split.dealing import check_way, dealt
from compressor.steps.split.opening import part_width, seen_as, warn_of_parts
from compressor.surgery.job import make_job, output_size


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
    check_way(by, bool(sources), "give it by --data")
    if parts < 2:
        raise CompressionError(f"--split {parts} leaves every expert whole; give at least 2 parts")
    if sources:
        refuse_floods(samples, sequence_length)
    with open_run(model, revision, dtype, device, progress) as run:
        with run.clock.phase("open"):
            run.model = seen_as(run.model, parts)
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
            asked = {"parts": parts, "by": by if sources else WEIGHTS}
            key = request_key("split", asked, told, seed, max_shard_bytes, versions(), *facts)
        with alone(place) as run.folder:
            run.digest = key
            if not overwrite and answers(place, key):
                tell_in_place(place)
                return _summary(run, str(place))
            try:
                _write(run, text, by, seed, place, overwrite, max_shard_bytes)
            except Exception:
                load_exporter("safetensors").discard(place)
                raise
        words, seconds = None if command is None else tuple(command), dict(run.clock.seconds)
        source = run.model.source
        record_run(place, RunRecord(source.name, source.revision, told, seconds, run.peak.anonymous, words))
        return _summary(run, str(place))


def _write(
    run: Run, text: Calibration | None, by: str, seed: int, place: Path, overwrite: bool, max_shard_bytes: int | None
) -> None:
    """Put the neurons in order and write the output; an order that a killed run has kept is taken."""
    model, writer, key = run.model, load_exporter("safetensors"), run.digest
    writer.check_target(place, overwrite)
    writer.check_space(place, output_size(model, model.architecture.experts).bytes)
    warn_of_parts(model)
    with run.clock.phase("measure"):
        assert run.folder is not None
        run.model = model = dealt(model, text, by, run.progress, seed, run.folder / f"split-{key[:16]}.safetensors")
    plan = replace(whole_plan(model, model.architecture), seed=seed, split=model.split)
    job, _ = make_job(model, plan, max_shard_bytes)

    def verify(folder: Path) -> None:
        job.verify(folder)
        note_request(folder, key)

    with run.clock.phase("write"):
        run.progress.start("write", len(job.units))
        writer.write(
            replace(job, verify=verify),
            place,
            overwrite,
            lambda unit, _: run.progress.advance(unit or "embeddings and head"),
        )


def _summary(run: Run, out: str) -> SplitSummary:
    after = run.model.architecture
    before = (run.model.whole or run.model).architecture
    parts, width = after.layers[0].parts, part_width(run.model)
    said = read_object(Path(out) / COMPRESSION)["plan"]["split"]
    return SplitSummary(
        out,
        parts,
        said["by"],
        before.experts,
        after.experts,
        before.layers[0].top_k,
        after.layers[0].top_k,
        width * parts,
        width,
        dict(run.clock.seconds),
    )
