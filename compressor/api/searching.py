"""Compressing under a gate: the output is put in place only if it passes, alone or as the smallest that does."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor.api.compressing import Summary, compress
from compressor.checkpoint.source import ModelSource, locate
from compressor.errors import CompressionError, RejectedError
from compressor.evaluation.scores import REPORT
from compressor.evaluation.tasks import EvaluationTask, resolve_tasks
from compressor.gates.report import LONE_HALVES, gate_json
from compressor.gates.run import GateRequest, run_gate
from compressor.gates.verdict import GateResult, Verdict
from compressor.model.architecture import MoeLayer
from compressor.model.routers import check_count
from compressor.progress import Progress, Silent


@dataclass(frozen=True, slots=True)
class Attempt:
    """One model that went through the gate."""

    experts: int
    result: GateResult
    accepted: bool


@dataclass(frozen=True, slots=True)
class Gated:
    """What came of it: the summary of the output that was left in place, if one was, and all attempts in order."""

    summary: Summary | None
    attempts: tuple[Attempt, ...]

    @property
    def decisive(self) -> Attempt:
        """The attempt whose model is in place; the last one if none is."""
        accepted = [attempt for attempt in self.attempts if attempt.accepted]
        return accepted[-1] if accepted else self.attempts[-1]


def compress_gated(
    model: str,
    out: str | Path,
    gate: GateRequest,
    *,
    inconclusive: Verdict = "inconclusive",
    keep_failed: bool = False,
    search: bool = False,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    after: Callable[[Path], None] | None = None,
    **request: Any,
) -> Gated:
    """Compress, gate, and leave the output in place only if it passes; keywords are those of `compress`.

    An inconclusive gate counts as `inconclusive` says. `after` may add to an output that is about to be put in place.
    With `search` the number of experts is bisected for the smallest model that passes; the confidence then holds for
    all models that are tried together (Bonferroni).
    """
    if search and (keep_failed or request.get("experts") is not None or request.get("ratio") is not None):
        raise CompressionError(
            "--search finds the number of experts and keeps what passes; leave out --experts, --ratio and --keep-failed"
        )
    listener = progress or Silent()
    source = locate(model, revision, listener)
    tasks = resolve_tasks(gate.options)
    runs = _Runs(source, Path(out), gate, tasks, inconclusive, keep_failed, listener, after)
    again = {**request, "revision": source.revision, "progress": listener}
    if not search:
        summary, attempt = runs.attempt(model, overwrite, again)
        return Gated(summary, (attempt,))
    counts = possible_counts(source, request)
    steps = math.ceil(math.log2(len(counts) + 1))
    runs.gate = replace(gate, confidence=1 - (1 - gate.confidence) / steps)
    summaries: list[Summary] = []
    attempts: list[Attempt] = []

    def passes(experts: int) -> bool:
        done = bool(summaries)
        summary, attempt = runs.attempt(model, overwrite or done, {**again, "experts": experts, "ratio": None})
        attempts.append(attempt)
        summaries.extend([] if summary is None else [summary])
        return attempt.accepted

    smallest(counts, passes)
    return Gated(summaries[-1] if summaries else None, tuple(attempts))


def smallest(counts: Sequence[int], passes: Callable[[int], bool]) -> int | None:
    """The smallest of ascending `counts` that passes, if larger ones do whenever a smaller one does; None if none."""
    low, high = 0, len(counts)
    while low < high:
        middle = (low + high) // 2
        if passes(counts[middle]):
            high = middle
        else:
            low = middle + 1
    return counts[low] if low < len(counts) else None


def possible_counts(source: ModelSource, request: dict[str, Any]) -> list[int]:
    """Numbers of experts that every layer can be cut to."""
    from compressor.model.opened import open_model

    layers = open_model(source, request.get("dtype", "auto"), request.get("device", "auto")).architecture.layers
    found = [count for count in range(1, layers[0].experts) if all(_possible(layer, count) for layer in layers)]
    if not found:
        raise CompressionError(
            f"no number of experts below {layers[0].experts} works for this model; nothing to search"
        )
    return found


def _possible(layer: MoeLayer, count: int) -> bool:
    try:
        check_count(layer, count, layer.name)
    except CompressionError:
        return False
    return True


def _experts(folder: Path) -> int:
    """The experts per layer that an output says it has."""
    return int(json.loads((folder / "compression.json").read_text(encoding="utf-8"))["plan"]["experts"])


@dataclass(slots=True)
class _Runs:
    """What all attempts share."""

    source: ModelSource
    out: Path
    gate: GateRequest
    tasks: Sequence[EvaluationTask]
    inconclusive: Verdict
    keep_failed: bool
    progress: Progress
    after: Callable[[Path], None] | None

    def attempt(self, model: str, overwrite: bool, request: dict[str, Any]) -> tuple[Summary | None, Attempt]:
        """Compress into place if the gate accepts what is about to be put there."""
        found: list[Attempt] = []

        def accept(folder: Path) -> None:
            made = ModelSource(str(folder), None, folder)
            result = run_gate(self.source, made, self.tasks, self.gate, self.progress, label=self.out.name)
            found.append(Attempt(_experts(folder), result, self._accepted(result)))
            (folder / REPORT).write_text(gate_json(result), encoding="utf-8", errors=LONE_HALVES)
            if not (self.keep_failed or found[-1].accepted):
                raise RejectedError(f"{self.out} did not pass the gate ({result.verdict}) and was not written")
            if self.after is not None:
                self.after(folder)

        try:
            summary = compress(model, self.out, overwrite=overwrite, accept=accept, **request)
        except RejectedError:
            summary = None
        return summary, found[-1]

    def _accepted(self, result: GateResult) -> bool:
        return (self.inconclusive if result.verdict == "inconclusive" else result.verdict) == "pass"
