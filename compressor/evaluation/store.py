"""Results of earlier evaluations on disk, found again only by the same model, task and options."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import ModelSource
from compressor.evaluation.options import EvaluationOptions
from compressor.evaluation.scores import ItemScores
from compressor.evaluation.tasks import EvaluationTask
from compressor.files import file_digest, write_whole
from compressor.versions import versions

logger = logging.getLogger(__name__)

PACKAGES = ("lm-eval", "torch", "transformers")
READ_WHOLE = (".json", ".jinja", ".model", ".txt")  # files beside the weights that decide what a model answers
REPORT = "gate.json"  # written beside the weights once they are evaluated; no part of the model
TUPLES = ("ids", "values", "weights", "clusters")




def identity(source: ModelSource) -> dict[str, Any]:
    """What a model's answers depend on, wherever it lies: a commit on the Hub, or the files of a folder."""
    if source.revision is not None:
        return {"repository": source.name, "commit": source.revision}
    beside = (path for path in source.folder.iterdir() if path.suffix in READ_WHOLE and path.name != REPORT)
    others = sorted(path for path in beside if path.is_file())
    return {
        "weights": [list(entry) for entry in Checkpoint(source.folder).stamp()],
        "files": {path.name: file_digest(path) for path in others},
    }


def judged_identity(source: ModelSource) -> dict[str, Any]:
    """The same with the SHA-256 of a folder's weight files, by which a copy is known for the model that was judged."""
    found = identity(source)
    if source.revision is not None:
        return found
    return {**found, "digests": {str(entry[0]): file_digest(source.folder / entry[0]) for entry in found["weights"]}}




@dataclass(frozen=True, slots=True)
class ResultStore:
    """A folder with a JSON file for each model, task and set of options."""

    folder: Path

    def key(self, model: Mapping[str, Any], task: EvaluationTask, options: EvaluationOptions) -> dict[str, Any]:
        """All that a result depends on."""
        return {
            "model": dict(model),
            "task": task.name,
            "version": task.version,
            "options": options.facts(),
            "packages": versions(PACKAGES),
        }

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of a key."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"

    def load(self, key: Mapping[str, Any]) -> ItemScores | None:
        """What was stored; None if nothing was, or nothing that can be read."""
        try:
            content = json.loads(self.path(key).read_text(encoding="utf-8"))
            if content["key"] != json.loads(json.dumps(key)):
                return None
            fields: dict[str, Any] = {k: tuple(v) if k in TUPLES else v for k, v in content["scores"].items()}
            scores = ItemScores(**fields)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.debug("the stored result %s is ignored: %s", self.path(key), error)
            return None
        return scores if _whole(scores, key) else None

    def save(self, key: Mapping[str, Any], scores: ItemScores) -> None:
        """Store a result; the file is there whole or not at all. Where that fails, the run goes on with a warning."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.path(key), json.dumps({"key": key, "scores": asdict(scores)}))
        except OSError as error:
            logger.warning("the results on %s could not be stored in %s: %s", scores.task, self.folder, error)


def _whole(scores: ItemScores, key: Mapping[str, Any]) -> bool:
    """Whether stored results are of the task asked for, with as many numbers as items."""
    counts = {len(scores.ids), len(scores.values)}
    counts |= {len(entries) for entries in (scores.weights, scores.clusters) if entries}
    numbers = all(isinstance(value, int | float) for value in (*scores.values, *scores.weights))
    return scores.task == key["task"] and scores.version == key["version"] and len(counts) == 1 and numbers
