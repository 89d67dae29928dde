"""The Python API of CoMoE: `train_comoe` tunes a model by LoRA experts, `evaluate_comoe` asks it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import ModelSource, locate
from compressor.comoe.evaluating import ask
from compressor.comoe.layer import load_adapters, read_facts
from compressor.comoe.options import ComoeConfig, TuningOptions
from compressor.comoe.report import NAMES, ComoeEvaluation, write_evaluation
from compressor.comoe.training import NAMES as TRAINED
from compressor.comoe.training import Trained, train
from compressor.errors import CompressionError
from compressor.evaluation.evaluate import identity
from compressor.evaluation.tasks import items_of
from compressor.files import check_folder
from compressor.formatting import label
from compressor.model.architecture import load_config
from compressor.model.opened import load_whole, pick_device, pick_dtype
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress, quiet_transformers


def train_comoe(
    model: str,
    output: str | Path,
    *,
    tasks: Sequence[str] = (),
    data: str | Path | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
    config: ComoeConfig | None = None,
    options: TuningOptions | None = None,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Trained:
    """Train LoRA experts beside a model's layers on items, and write them into the folder `output`.

    Items are those of the training splits of lm-eval `tasks` (multiple choice; the first `limit` of each), or the
    lines of the JSONL file `data`. The whole model is read into memory. A run that was killed goes on when it is
    started again. Raises `CompressionError` for whatever cannot be trained, leaving no output.
    """
    folder, config, options = Path(output), config or ComoeConfig(), options or TuningOptions()
    if options.contrastive > 0:
        config.check_contrast()
    check_folder(folder, TRAINED, overwrite)
    items = items_of(tasks, data, limit, include_path, training=True)
    source = locate(model, revision, progress)
    tokenizer, loaded = _loaded(source, dtype)
    return train(
        loaded,
        tokenizer,
        items,
        config,
        options,
        folder,
        label=source.label,
        identity={**identity(source), "dtype": str(loaded.dtype)},
        overwrite=overwrite,
        use_cpu=pick_device(device).type == "cpu",
        progress=progress,
    )


def evaluate_comoe(
    model: str,
    adapters: str | Path,
    *,
    tasks: Sequence[str] = (),
    data: str | Path | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
    base: bool = False,
    output: str | Path | None = None,
    batch_size: int = 16,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ComoeEvaluation:
    """Ask a model with adapters the items of lm-eval `tasks` or of the JSONL file `data`; with `base` also without.

    With `output` the result is written there as JSON, Markdown, a page and two pictures. Raises `CompressionError`
    for adapters of another model.
    """
    if batch_size < 1:
        raise CompressionError(f"--batch-size is {batch_size}; give a whole number of at least 1")
    folder = None if output is None else Path(output)
    if folder is not None:
        check_folder(folder, NAMES, overwrite)
    facts = read_facts(Path(adapters))
    items = items_of(tasks, data, limit, include_path)
    source, place = locate(model, revision, progress), pick_device(device)
    tokenizer, loaded = _loaded(source, dtype)
    before = ask(loaded.to(place), tokenizer, items, batch_size=batch_size, progress=progress) if base else ()
    load_adapters(loaded, adapters).to(place)
    after = ask(loaded, tokenizer, items, batch_size=batch_size, progress=progress)
    evaluation = ComoeEvaluation(
        source.label, label(str(adapters)), facts.config.experts, facts.config.top_k, tuple(facts.layers), after, before
    )
    if folder is not None:
        write_evaluation(evaluation, folder, overwrite)
    return evaluation


def _loaded(source: ModelSource, dtype: str) -> tuple[Any, Any]:
    tokenizer = load_tokenizer(source.folder)
    computed = pick_dtype(dtype, load_config(source.folder), Checkpoint(source.folder))
    with quiet_transformers():
        return tokenizer, load_whole(source.folder, dtype=computed)
