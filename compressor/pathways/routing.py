"""A gate's compressed model on optimised pathways: what can be refused before a weight is read, and who answers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.evaluation.evaluate import Answerer
from compressor.evaluation.tasks import EvaluationOptions, EvaluationTask
from compressor.pathways.answering import opened_with
from compressor.pathways.options import METHOD, Routing
from compressor.pathways.reference import ReferenceSet, reference_digest
from compressor.records import plain_json

OTHER_ANSWERS = {"generate_until": "writes its answers", "loglikelihood_rolling": "rates whole texts"}


def refuse_other_tasks(tasks: Sequence[EvaluationTask]) -> None:
    """Refuse tasks that give no answers to choose from after a prompt."""
    for task in tasks:
        for name, part in task.parts.items():
            if (what := OTHER_ANSWERS.get(str(getattr(part, "OUTPUT_TYPE", None)))) is not None:
                raise CompressionError(
                    f"task {name!r} {what}, so it has no prompt to optimise a pathway for; name tasks of multiple "
                    "choice, or leave --routing out"
                )


def routed_answerer(
    routing: Routing, reference: ReferenceSet, source: ModelSource, options: EvaluationOptions
) -> Answerer:
    """Who answers for a model that is routed by its reference set.

    Raises `CompressionError` for the set of another model or tokenizer.
    """
    opened_with(reference, source, options.dtype, options.device)  # the base answers first, and that may take hours
    facts = {
        "method": METHOD,
        "reference": reference_digest(Path(routing.reference)),
        "options": plain_json(routing.options),
    }

    @contextmanager
    def load(source: ModelSource, options: EvaluationOptions) -> Iterator[Any]:
        from compressor.pathways.routed_model import routed_model

        with routed_model(source, options, routing, reference) as model:
            yield model

    return Answerer(facts, load)
