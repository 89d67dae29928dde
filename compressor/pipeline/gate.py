"""The gate of a recipe: an output is put in place only if it passes."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compressor.answers.generation import Answering
from compressor.answers.lm_eval_run import REPORT, plan_evaluation
from compressor.answers.prompts import read_prompts
from compressor.answers.tasks import EvaluationOptions, EvaluationTask, read_batch_size, resolve_tasks
from compressor.checkpoint.source import ModelSource
from compressor.data.sources import domain_of
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.files import default_folder
from compressor.pipeline.formats import SAFETENSORS, formats_of
from compressor.pipeline.resolve import content_of
from compressor.progress import Progress
from compressor.quality_gate.report import LONE_HALVES, gate_json
from compressor.quality_gate.run import GateRequest, Outlook, check_readings, outlook, passable, run_gate
from compressor.quality_gate.teacher_forced import Judging
from compressor.quality_gate.verdict import GateResult, gate_content
from compressor.recipe.recipe import BehaviourOptions, GateOptions, Recipe
from compressor.recipe.step import CONSTANTS
from compressor.run_record import request_key, write_cached

MAX_LOOP_RISE = 0.01  # of answers, where prompts are named and no limit


@dataclass(frozen=True, slots=True)
class PreparedGate:
    """A gate with what is known before anything is compressed."""

    source: ModelSource  # the base
    request: GateRequest
    tasks: tuple[EvaluationTask, ...]
    outlook: Outlook  # what it can show
    keep_failed: bool  # leave an output that fails in place, too
    trial: Path | None = None  # file of the cache that keeps the result of one model of a search

    @property
    def key(self) -> str:
        """SHA-256 of everything beside the models that decides whether an output is put in place."""
        return request_key(self.facts, self.task_versions, self.request.inconclusive, self.keep_failed)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that decide a verdict beside models and tasks."""
        request, judging = self.request, self.request.judging
        facts = asdict(replace(request, options=replace(request.options, stream=None)))
        del facts["cache"], facts["inconclusive"]
        sources = () if judging is None else (*judging.texts, *judging.answers)
        return {**facts, "read": [content_of(domain_of(source)[0]) for source in sources]}

    @property
    def task_versions(self) -> list[tuple[str, str]]:
        """Names of the tasks with their versions."""
        return [(task.name, task.version) for task in self.tasks]

    def accepts(self, result: GateResult) -> bool:
        """Return True if a result passes, or is undecided and counts as a pass."""
        return self.request.counted(result.verdict) == "pass"


def gate_request(
    gate: GateOptions, device: str = "auto", dtype: str = "auto", cache: Path | None = None
) -> GateRequest:
    """Return what a gate of these options tests."""
    answering = answering_of(gate, gate.limit)
    judging = judging_of(gate, gate.max_flips, gate.max_loss_rise)
    loop_rise, missed_rise = gate.max_loop_rise, gate.max_missed_rise
    if answering is not None and not gate.teacher_forced:
        if loop_rise is None and missed_rise is None:
            loop_rise = MAX_LOOP_RISE
        answering = replace(answering, max_loop_rise=loop_rise, max_missed_rise=missed_rise)
    elif loop_rise is not None or missed_rise is not None:
        hint = "leave out --teacher-forced" if gate.teacher_forced else "name --prompts"
        raise CompressionError(f"--max-loop-rise and --max-missed-rise judge answers of both models; {hint}")
    limits_readings = gate.max_flips is not None or gate.max_loss_rise is not None
    if limits_readings != (judging is not None):
        raise CompressionError("--text and --answers are judged by --max-flips or --max-loss-rise; give one of each")
    options = EvaluationOptions(
        tasks=gate.tasks,
        limit=gate.limit,
        include_path=None if gate.include_path is None else Path(gate.include_path),
        batch_size=read_batch_size(str(gate.batch_size)),
        device=device,
        dtype=dtype,
        stream=gate.stream,
    )
    return GateRequest(
        options,
        max_drop=gate.max_drop,
        max_task_drop=gate.max_task_drop,
        confidence=gate.confidence,
        inconclusive=gate.inconclusive or "inconclusive",
        cache=cache or default_folder(),
        answering=answering,
        judging=judging,
    )


def answering_of(options: BehaviourOptions, limit: int | None) -> Answering | None:
    """Return which answers are written, with the prompts read; None if none are named."""
    if not options.prompts:
        return None
    named = options.model_dump(include={"max_new_tokens", "temperature", "top_p", "seeds", "chat", "strict"})
    return Answering(read_prompts(options.prompts, limit=limit, strict=options.strict), **named)


def judging_of(
    options: BehaviourOptions, max_flips: float | None = None, max_loss_rise: float | None = None
) -> Judging | None:
    """Return the text that both models read; None if none is named."""
    if options.teacher_forced and not options.prompts:
        raise CompressionError("--teacher-forced is of answers to prompts; name --prompts, or give --answers")
    if not (options.text or options.answers or options.teacher_forced):
        return None
    return Judging(
        texts=options.text,
        samples=options.text_samples,
        length=options.text_length,
        answers=options.answers,
        forced=options.teacher_forced,
        max_flips=max_flips,
        max_loss_rise=max_loss_rise,
        strict=options.strict,
    )


def request_of(recipe: Recipe, device: str = "auto") -> GateRequest:
    """Return what a recipe's gate tests; raise `CompressionError` for an output that no gate can load."""
    gate = recipe.gate
    assert gate is not None
    if not isinstance(recipe.model, str):
        raise CompressionError("a gate loads the base from its files; name the model's folder or Hub id")
    if any(CONSTANTS in step.changes for step in recipe.steps):
        raise CompressionError("--gate loads the output by stock transformers, which cannot load --format mone")
    if SAFETENSORS not in formats_of(recipe):
        raise CompressionError("--gate judges a safetensors output; pass --format safetensors,onnx with it")
    strict = gate.strict or recipe.calibration.strict
    return gate_request(gate.model_copy(update={"strict": strict}), device)


def read_outlook(request: GateRequest) -> Outlook:
    """Return what a gate can show; its tasks are read, no model is."""
    return outlook(ranks().first_before_others(lambda: resolve_tasks(request.options)), request)


def prepare_gate(source: ModelSource, request: GateRequest, keep_failed: bool) -> PreparedGate:
    """Read a gate's tasks and look what is known of the base's answers.

    Raises `CompressionError` for a gate that not even an identical model passes, and for what the base cannot answer.
    """
    tasks = ranks().first_before_others(lambda: resolve_tasks(request.options))
    shown = passable(outlook(tasks, request))
    plan_evaluation(source, tasks, request.options, request.cache)
    check_readings(source, request)
    return PreparedGate(source, request, tasks, shown, keep_failed)


def judge(gate: PreparedGate, folder: Path, label: str, progress: Progress) -> GateResult:
    """Gate the output in a folder, by the name `label`, and write the result beside its weights."""
    output = ModelSource(str(folder), None, folder)
    result = run_gate(gate.source, output, gate.tasks, gate.request, progress, label=label)
    if ranks().is_first:
        (folder / REPORT).write_text(gate_json(result), encoding="utf-8", errors=LONE_HALVES)
        if gate.trial is not None:  # where it can't be cached, a killed search merely tries it again
            write_cached(gate.trial, gate_content(result))
    return result
