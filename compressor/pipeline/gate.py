"""The gate of a recipe: an output is put in place only if it passes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor.answers.lm_eval_run import plan_evaluation
from compressor.answers.scores import REPORT
from compressor.answers.stock import StockModel
from compressor.checkpoint.source import ModelSource
from compressor.data.sources import domain_of
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.files import LONE_HALVES, file_digest
from compressor.frozen import frozen
from compressor.pipeline.formats import formats_of
from compressor.pipeline.resolve import content_of
from compressor.progress import Progress
from compressor.prompt_date import dated
from compressor.quality_gate.report import gate_json
from compressor.quality_gate.run import (
    GateRequest,
    PowerAnalysis,
    asked_forms,
    passable,
    run_gate,
)
from compressor.quality_gate.teacher_forced import read_all
from compressor.quality_gate.verdict import GateResult, gate_content
from compressor.recipe.recipe import MONE, SAFETENSORS, Recipe
from compressor.run_record import request_key, write_cached


@frozen
class PreparedGate:
    """A gate with everything that is known before compression starts."""

    source: ModelSource  # the base
    request: GateRequest
    power: PowerAnalysis  # which differences it can detect
    trial: Path | None = None  # cache file for the result, if the model is one of a search

    @property
    def key(self) -> str:
        """SHA-256 of everything, apart from the models, that decides if an output is put in
        place."""
        options = self.request.options
        return request_key(
            self.facts, self.task_versions, options.inconclusive, options.keep_failed
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that decides a verdict, apart from models and tasks; streaming and output
        folders do not count."""
        options = self.request.options
        prompts = self.request.prompts
        return {
            "options": options.model_dump(
                mode="json", exclude={"stream", "inconclusive", "keep_failed"}
            ),
            "device": self.request.device,
            "dtype": self.request.dtype,
            "prompts": []
            if prompts is None
            else [(prompt.id, prompt.domain) for prompt in prompts.prompts],
            "baseline": None if options.baseline is None else file_digest(options.baseline),
            "read": [
                content_of(domain_of(source)[0]) for source in (*options.text, *options.answers)
            ],
        }

    @property
    def task_versions(self) -> list[tuple[str, str]]:
        """Names of the tasks with their versions."""
        return [(task.name, task.version) for task in self.request.tasks]

    def accepts(self, result: GateResult) -> bool:
        """Return True if a result passes, or is undecided and counts as a pass."""
        return self.request.options.counted(result.verdict) == "pass"


def request_of(recipe: Recipe, device: str = "auto") -> GateRequest:
    """Return the request of a recipe's gate; raise `CompressionError` for an output that no gate
    can load."""
    gate = recipe.gate
    assert gate is not None
    if not isinstance(recipe.model, str):
        raise CompressionError(
            "a gate loads the base from its files; name the model's folder or Hub id"
        )
    if any(step.format == MONE for step in recipe.steps):
        raise CompressionError(
            "--gate loads the output by stock transformers, which cannot load --format mone"
        )
    if SAFETENSORS not in formats_of(recipe):
        raise CompressionError(
            "--gate judges a safetensors output; pass --format safetensors,onnx with it"
        )
    strict = gate.strict or recipe.calibration.strict
    return GateRequest.read(gate.model_copy(update={"strict": strict}), device)


def prepare_gate(source: ModelSource, request: GateRequest) -> PreparedGate:
    """Read a gate's tasks, its text and the stored results of the base.

    Raises `CompressionError` for a gate that even an identical model would fail, and for tasks that
    the base cannot do."""
    power = passable(request.power)
    if request.baseline is None:
        plan_evaluation(source, request.tasks, request.evaluation, request.cache)
    if request.options.reads:
        read_all(StockModel(source, request.device, request.dtype), request.options)
    with dated(request.date):  # an output has its base's tokenizer
        asked = asked_forms(source, source, request)
    return PreparedGate(source, request, replace(power, asked=asked))


def judge(gate: PreparedGate, folder: Path, label: str, progress: Progress) -> GateResult:
    """Gate the output in a folder, reported under the name `label`, and write the result beside its
    weights."""
    output = ModelSource.of(folder)
    with dated(gate.request.date):
        result = run_gate(gate.source, output, gate.request, progress, label)
    if ranks().is_first:
        (folder / REPORT).write_text(gate_json(result), encoding="utf-8", errors=LONE_HALVES)
        if gate.trial is not None:  # without the cache, a killed search only repeats the trial
            write_cached(gate.trial, gate_content(result))
    return result
