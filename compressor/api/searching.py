"""Compressing under a gate: the output is put in place only if it passes, alone or as the smallest that does."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor.api.compressing import Summary, compress
from compressor.api.repeating import answers, note_request, request_key
from compressor.api.trials import gate_facts, keep_trial, kept_trial, trial_key
from compressor.checkpoint.source import ModelSource
from compressor.distributed.places import held
from compressor.distributed.present import here
from compressor.errors import CompressionError, RejectedError
from compressor.evaluation.scores import REPORT
from compressor.evaluation.tasks import resolve_tasks
from compressor.gates.report import LONE_HALVES, gate_json, read_gate
from compressor.gates.run import GateRequest, plan_base, run_gate
from compressor.gates.verdict import GateResult, Verdict
from compressor.model.opened import open_model
from compressor.model.served import counts_below, unwarned
from compressor.planning.answering import seen
from compressor.planning.finer import with_parts
from compressor.planning.request import Request, request_digest
from compressor.planning.run import find_model
from compressor.progress import Progress, Silent
from compressor.records import read_object
from compressor.run_record import COMPRESSION


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
    terms: str | None = None,
    request: Request | None = None,
    command: Sequence[str] | None = None,
    **wanted: Any,
) -> Gated:
    """Compress, gate, and leave the output in place only if it passes; keywords are those of `Request`.

    An inconclusive gate counts as `inconclusive` says. `after` may add to an output that is about to be put in place;
    with `terms`, which tell what it adds, an output of this very request that is in place already is taken as it is.
    With `search` the number of experts is bisected for the smallest model that passes; the confidence then holds for
    all models that are tried together (Bonferroni). What it has tried is remembered, so that one which was killed
    tries nothing twice.
    """
    asked = Request.of(request, wanted)
    if search and (keep_failed or asked.experts is not None or asked.ratio is not None):
        raise CompressionError(
            "--search finds the number of experts and keeps what passes; leave out --experts, --ratio and --keep-failed"
        )
    listener = progress or Silent()
    source, target = find_model(model, revision, listener), Path(out)
    tasks = here().first_before_others(lambda: resolve_tasks(gate.options))
    known = after is None or terms is not None
    plan_base(source, tasks, gate)  # which refuses what the original cannot answer, before anything is made
    of_tasks = [(task.name, task.version) for task in tasks]
    judged = [gate_facts(gate), of_tasks, inconclusive, keep_failed, terms]
    attempts: list[Attempt] = []
    whole: str | None = None  # the key of a search, whose outputs may replace each other
    trial = ""  # the key of what a search is trying
    begun = False
    summaries: list[Summary] = []

    def accepts(result: GateResult) -> bool:
        return (inconclusive if result.verdict == "inconclusive" else result.verdict) == "pass"

    def judge(folder: Path) -> None:
        made = ModelSource(str(folder), None, folder)
        result = run_gate(source, made, tasks, gate, listener, label=target.name)
        experts = int(read_object(folder / COMPRESSION)["plan"]["experts"])
        accepted = here().told(lambda: accepts(result))  # from now on a rank that hears no may clear the folder
        attempts.append(Attempt(experts, result, accepted))
        if here().is_first:
            (folder / REPORT).write_text(gate_json(result), encoding="utf-8", errors=LONE_HALVES)
        if search:
            keep_trial(trial, result)
        if not (keep_failed or accepted):
            raise RejectedError(f"{target} did not pass the gate ({result.verdict}) and was not written")
        if after is not None:
            after(folder)
        if whole is not None and here().is_first:
            note_request(folder, whole)
            note_request(folder, trial)

    def passes(tried: Request) -> bool:
        before, again = len(attempts), begun and here().told(lambda: answers(target, trial))
        with suppress(RejectedError):
            made = compress(
                model,
                out,
                tried,
                revision=source.revision,
                overwrite=overwrite or (not again and (begun or bool(summaries))),
                progress=listener,
                accept=judge,
                terms=request_key(judged) if known else None,
                command=command,
            )
            summaries.append(made)
            if len(attempts) == before:  # it is in place since an earlier run of this command, and was judged then
                result = read_gate(target / REPORT)
                if result.routing is not None:  # it was put there since, and is no verdict on the weights alone
                    raise CompressionError(f"{target / REPORT} is of a routed model; compress again with --overwrite")
                attempts.append(Attempt(made.experts_after, result, accepts(result)))
        return attempts[-1].accepted

    with held(target):
        if search:
            opened = open_model(source, asked.dtype, asked.device)
            asked = with_parts(opened, asked)
            counts = possible_counts(source, asked)
            whole = request_key(request_digest(opened, asked), judged)
            begun = known and here().told(lambda: answers(target, str(whole)))
            steps = math.ceil(math.log2(len(counts) + 1))
            gate = replace(gate, confidence=1 - (1 - gate.confidence) / steps)

            def with_experts(count: int) -> Request:
                nonlocal trial
                tried = replace(asked, experts=count)
                trial = trial_key(opened, tried, gate, of_tasks, terms)
                return tried

            def tries(count: int) -> bool:
                tried = with_experts(count)
                if (kept := kept_trial(trial)) is None:
                    return passes(tried)
                attempts.append(Attempt(count, kept, accepts(kept)))
                return attempts[-1].accepted

            with unwarned():
                least = smallest(counts, tries)
                if least is not None and not (summaries and summaries[-1].experts_after == least):
                    # it passed before the search was killed, and may not have come into its place
                    attempts[:] = [attempt for attempt in attempts if attempt.experts != least]
                    passes(with_experts(least))
        else:
            passes(asked)
    return Gated(summaries[-1] if summaries else None, tuple(attempts))


def smallest(counts: Sequence[int], passes: Callable[[int], bool]) -> int | None:
    """The smallest of ascending `counts` that passes, if larger ones do whenever a smaller one does; None if none."""
    first = bisect_left(counts, True, key=passes)
    return counts[first] if first < len(counts) else None


def possible_counts(source: ModelSource, request: Request) -> list[int]:
    """Numbers of experts that every layer can be cut to."""
    layers = seen(open_model(source, request.dtype, request.device), request).architecture.layers
    if found := counts_below(layers):
        return found
    raise CompressionError(f"no number of experts below {layers[0].experts} works for this model; nothing to search")
