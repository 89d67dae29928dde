"""Training CoMoE adapters from items, resumable, into a folder that appears complete or not at all."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from compressor.comoe.adapters import FACTS, TENSORS, adapter_facts, write_adapters
from compressor.comoe.evaluating import collate, examples, pad_token
from compressor.comoe.layer import inject_config
from compressor.comoe.options import ComoeConfig, TuningOptions
from compressor.errors import faults_told
from compressor.evaluation.items import Item, item_lines, positions
from compressor.files import check_folder, whole_folder
from compressor.locking import alone, clear
from compressor.progress import Progress, Silent, quiet_transformers
from compressor.records import plain_json
from compressor.replaceable import json_object

LOG = "log.jsonl"
NAMES = (FACTS, TENSORS, LOG)
STATE = "trainer_state.json"  # what the Trainer writes last into a checkpoint
TIMES = frozenset({"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"})


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training run came to."""

    config: ComoeConfig
    items: int
    steps: int
    parameters: int  # that were trained
    log: tuple[Mapping[str, float], ...]  # a line every so many steps
    files: tuple[Path, ...]


def train(
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    config: ComoeConfig,
    options: TuningOptions,
    output: Path,
    *,
    label: str = "",
    identity: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    use_cpu: bool = True,
    progress: Progress | None = None,
) -> Trained:
    """Put experts into a model, train them on the items' answers, and write the adapters and the log to `output`.

    A killed run goes on from its last checkpoint, and ends with the same bytes, where everything that decides them is
    the same: `identity` says what tells the model apart from others. Raises `CompressionError` for a contrastive loss
    without positives or negatives, for an item that is too long, and for a loss that is no number.
    """
    if options.contrastive > 0:
        config.check_contrast()
    check_folder(output, NAMES, overwrite)
    most, vocabulary = positions(model.config), model.get_input_embeddings().weight.shape[0]
    made = examples(items, tokenizer, vocabulary, most)
    digest = hashlib.sha256(item_lines(items).encode()).hexdigest()
    inject_config(model, config)
    settings = {"config": config, "options": options, "data": digest, "model": dict(identity or {"name": label})}
    with alone(output) as work:
        run = work / "training"
        last = _prepared(run, json.dumps(plain_json(settings), sort_keys=True))
        trainer = _trainer(model, made, options, run, pad_token(tokenizer), use_cpu, progress or Silent())
        remedies = "lower --batch-size", "see whether stock transformers can train the model"
        with quiet_transformers(), faults_told("the model could not be trained", *remedies):
            if last is None:
                trainer.train()
            elif json_object(last / STATE)["global_step"] < trainer.args.max_steps:
                trainer.train(resume_from_checkpoint=str(last))
            else:  # what had only to be written; the stock loop might take one step more
                trainer.finish_from(last)
        log = tuple(
            {name: value for name, value in line.items() if name not in TIMES}
            for line in trainer.state.log_history
            if "loss" in line
        )
        training = {
            "items": len(items),
            "tasks": Counter(item.task for item in items),
            "data": digest,
            "steps": trainer.state.global_step,
            "options": options,
        }
        with whole_folder(output, NAMES, overwrite) as folder:
            write_adapters(model, adapter_facts(model, label, training), folder)
            told = (json.dumps(plain_json(line), sort_keys=True) + "\n" for line in log)  # as the Trainer keeps them
            (folder / LOG).write_text("".join(told), encoding="utf-8")
        shutil.rmtree(run, ignore_errors=True)
    trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
    return Trained(config, len(items), trainer.state.global_step, trained, log, tuple(output / name for name in NAMES))


def _prepared(run: Path, settings: str) -> Path | None:
    """The last whole checkpoint of an earlier run with these settings; what another run has left is removed."""
    note = run / "settings.json"
    if not note.is_file() or note.read_text(encoding="utf-8") != settings:
        clear(run)
        run.mkdir(exist_ok=True)
        note.write_text(settings, encoding="utf-8")
    found = [(int(path.name.rpartition("-")[2]), path) for path in run.glob("checkpoint-*")]
    for _, path in sorted(found, reverse=True):
        if json_object(path / STATE):
            return path
        shutil.rmtree(path)  # a kill came while it was written
    return None


def _trainer(
    model: nn.Module,
    made: Sequence[Any],
    options: TuningOptions,
    run: Path,
    pad: int,
    use_cpu: bool,
    progress: Progress,
) -> Any:
    from transformers import PrinterCallback, TrainingArguments

    from compressor.comoe.trainer import ComoeTrainer, Told

    total = options.total_steps(len(made))
    arguments = TrainingArguments(
        output_dir=str(run),
        max_steps=total,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=round(options.warmup * total),
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=options.log_every,
        save_steps=options.save_every,
        save_total_limit=2,
        seed=options.seed,
        data_seed=options.seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=use_cpu,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        logging_nan_inf_filter=False,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # of one process one device: replicas would not be watched
    trainer = ComoeTrainer(
        model,
        arguments,
        options=options,
        train_dataset=made,
        data_collator=partial(collate, pad=pad),
        callbacks=[Told(progress)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
