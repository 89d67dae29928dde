"""The Python API of reference sets: `reference` asks a model items and keeps those that it answers right."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.checkpoint.source import locate
from compressor.evaluation.tasks import item_options, items_of
from compressor.files import check_folder
from compressor.locking import alone
from compressor.model.opened import open_model
from compressor.pathways.options import OWN
from compressor.pathways.reference import NAMES, Asked, ReferenceFacts, build_reference, write_reference
from compressor.progress import Progress, Silent


@dataclass(frozen=True, slots=True)
class ReferenceSummary:
    """What a reference set holds, and where it was written."""

    facts: ReferenceFacts
    kept: int  # items that the model answers right
    asked: tuple[Asked, ...]  # for each task
    files: tuple[Path, ...]


def reference(
    model: str,
    output: str | Path,
    *,
    tasks: Sequence[str] = (),
    data: str | Path | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
    embedding: str = OWN,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ReferenceSummary:
    """Write the items that a model answers right, with embeddings and pathways, into the folder `output`.

    Items are those of lm-eval `tasks` (multiple choice; the first `limit` of each), or the lines of the JSONL file
    `data` with `prompt`, `answer` and, of multiple choice, `choices`. The whole model is read into memory. Raises
    `CompressionError` where no item is answered right, or the model's late layers cannot be run by themselves.
    """
    folder = Path(output)
    options = item_options(tasks, data, limit, include_path, dtype)
    check_folder(folder, NAMES, overwrite)
    with alone(folder):
        items = items_of(options, data)
        opened = open_model(locate(model, revision, progress), dtype, device)
        made, asked = build_reference(opened, items, embedding, progress or Silent())
        files = write_reference(made, folder, overwrite)
    return ReferenceSummary(made.facts, len(made.items), asked, tuple(files))
