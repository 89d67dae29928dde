"""Training CoMoE adapters on items by transformers' Trainer, resumable, into a folder that appears
complete."""

import hashlib
import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from compressor.answers.asking import pad_token, with_rows
from compressor.answers.items import item_lines
from compressor.answers.models import identity as identity_of
from compressor.answers.tasks import items_of
from compressor.checkpoint.source import locate
from compressor.comoe.cost import Cost, measured
from compressor.comoe.evaluating import Example, collate, examples, load
from compressor.comoe.layer import (
    FACTS,
    TENSORS,
    adapter_tensors,
    comoe_layers,
    inject,
    model_contrast,
    watching,
    write_adapters,
)
from compressor.comoe.options import ComoeConfig, TuningOptions
from compressor.devices import pick_device
from compressor.errors import CompressionError, wrap_faults
from compressor.files import check_folder, clear, json_object, lock_output, whole_folder
from compressor.frozen import frozen
from compressor.progress import Progress, Silent, quiet_transformers
from compressor.records import plain_json

LOG = "log.jsonl"
COST = "cost.json"  # which differs from run to run, as no other file does
NAMES = (FACTS, TENSORS, LOG, COST)
PRIME = 1_000_003  # spreads the seeds of a run's steps


class ComoeTrainer(Trainer):
    """Cross entropy + weight * contrastive loss (equation 13); both, and the gap's lower bound, are
    logged.

    With a weight (`options.contrastive`) of 0 the contrastive loss is measured without a gradient,
    and the training is plain tuning. Anchors are drawn from (seed, step), so that a resumed run
    draws them again. Checkpoints hold the adapters alone. Raises `CompressionError` at the first
    loss that is no number."""

    def __init__(
        self,
        model: Any,
        dataset: Sequence[Example],
        options: TuningOptions,
        run: Path,
        pad: int,
        use_cpu: bool,
        progress: Progress,
    ) -> None:
        arguments = training_arguments(options, len(dataset), run, use_cpu)
        collator: Any = partial(collate, pad=pad)
        callbacks: Any = [Reporting(progress)]
        super().__init__(
            model, arguments, train_dataset=dataset, data_collator=collator, callbacks=callbacks
        )
        self.remove_callback(PrinterCallback)
        self.options = options
        self.weight = options.contrastive
        self.experts_beside = comoe_layers(model)
        first = next(iter(self.experts_beside.values()))
        self.negatives = first.router.shape[0] - first.top_k
        self.anchors = first.top_k if options.anchors == "all" else 1  # whose losses are added up
        # else no contrastive loss is defined
        self.measures = first.top_k > 1 and self.negatives > 0
        self._parts = defaultdict[str, float](float)  # sums over the steps since the last log
        self._steps_since = 0
        self._step = -1
        self._generator = torch.Generator()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """A batch's part of its step's loss, as the stock method gives it, and the weighted
        contrastive loss."""
        if self.state.global_step != self._step:
            self._step = self.state.global_step
            self._steps_since += 1
            self._generator.manual_seed(self.args.seed * PRIME + self._step)
        term: Tensor | None = None
        with watching(self.experts_beside if self.measures else {}):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            if self.measures:
                with torch.set_grad_enabled(self.weight > 0 and torch.is_grad_enabled()):
                    term = model_contrast(
                        self.experts_beside.values(),
                        inputs["attention_mask"],
                        self.options,
                        self._generator,
                    )
        # a model that is told the step's number of answer tokens divides by it; else the Trainer
        # divides by the batches
        batches = int(self.current_gradient_accumulation_steps)
        divided = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        self._parts["cross_entropy"] += float(loss if divided else loss / batches)
        if term is not None:
            self._parts["contrastive"] += float(term / batches)
            if self.weight > 0:
                loss = loss + self.weight * (term / batches if divided else term)
        if not bool(loss.isfinite()):
            raise CompressionError(
                f"the loss is {float(loss)} at step {self.state.global_step + 1}; lower "
                "--learning-rate, or check the model with --dtype float32"
            )
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The stock figures with the parts of the loss, means over the steps since the last
        time."""
        if "loss" in logs and self._steps_since:
            logs |= {name: total / self._steps_since for name, total in self._parts.items()}
            if "contrastive" in logs:
                # Theorem 1's lower bound, in nats, of a token's gap of mutual information:
                # activated less inactive
                loss = logs["contrastive"] / self.anchors
                logs["information_gap"] = math.log(self.negatives) - loss
            self._parts.clear()
            self._steps_since = 0
        super().log(logs, start_time)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(adapter_tensors(self.model), folder / TENSORS)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        self.model.load_state_dict(load_file(Path(resume_from_checkpoint) / TENSORS), strict=False)


@dataclass
class Reporting(TrainerCallback):
    """Reports each step to a listener, and has the last one logged."""

    progress: Progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.progress.start("Training", state.max_steps)
        for _ in range(state.global_step):
            self.progress.advance("")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        last = next((line for line in reversed(state.log_history) if "loss" in line), None)
        self.progress.advance(f"loss {last['loss']:.4f}" if last else "")
        control.should_log |= state.global_step >= state.max_steps


@frozen
class Trained:
    """The outcome of a training run; `cost` is that of the steps since its last start."""

    config: ComoeConfig
    items: int
    steps: int
    parameters: int  # that were trained
    share: float  # of the model's own parameters
    log: tuple[Mapping[str, float], ...]  # a line every so many steps
    files: tuple[Path, ...]
    cost: Cost


def training_arguments(
    options: TuningOptions, items: int, run: Path, use_cpu: bool
) -> TrainingArguments:
    """Return the arguments of transformers' Trainer, for one device."""
    steps = options.steps
    if steps is None:
        batches = math.ceil(math.ceil(items / options.batch_size) / options.accumulation)
        steps = max(1, math.ceil(options.epochs * batches))
    arguments = TrainingArguments(
        output_dir=str(run),
        max_steps=steps,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=round(options.warmup * steps),
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
    # of one process one device: replicas would not be watched
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def train_comoe(
    model: str,
    output: str | Path,
    *,
    tasks: Sequence[str] = (),
    calibration: str | Path | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
    strict: bool = False,
    options: TuningOptions | None = None,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Trained:
    """Train LoRA experts beside a model's layers on items, and write them into the folder `output`.

    Items are those of the training splits of lm-eval `tasks` (multiple choice; the first `limit` of
    each), or the lines of the JSONL file `calibration`; those that cannot be trained on are left
    out, or refused if `strict`. The whole model is read into memory. A run that was killed goes on
    when it is started again."""
    output = Path(output)
    options = options or TuningOptions()
    check_folder(output, NAMES, overwrite)
    items = items_of(tasks, calibration, limit, include_path, strict, training=True)
    source = locate(model, revision, progress)
    tokenizer, loaded = load(source, dtype)
    identity = {**identity_of(source), "dtype": str(loaded.dtype)}
    use_cpu = pick_device(device).type == "cpu"
    questions = with_rows(items, loaded, tokenizer, strict, options.cutoff)
    items = [item for item, _ in questions]
    dataset = examples(questions)
    digest = hashlib.sha256(item_lines(items).encode()).hexdigest()
    inject(loaded, options.config)
    settings = plain_json({"options": options, "data": digest, "model": identity})
    with lock_output(output) as work:
        run = work / "training"
        last = _last_checkpoint(run, json.dumps(settings, sort_keys=True))
        trainer = ComoeTrainer(
            loaded, dataset, options, run, pad_token(tokenizer), use_cpu, progress or Silent()
        )
        remedies = "lower --batch-size", "see whether stock transformers can train the model"
        first_step = json_object(last / TRAINER_STATE_NAME)["global_step"] if last else 0
        target = trainer.args.device
        with (
            quiet_transformers(),
            wrap_faults("the model could not be trained", *remedies),
            measured(target) as costs,
        ):
            if last is None:
                trainer.train()
            elif first_step < trainer.args.max_steps:
                trainer.train(resume_from_checkpoint=str(last))
            else:  # all steps were taken, and the stock loop might take one more
                trainer._load_from_checkpoint(str(last))
                trainer.state = TrainerState.load_from_json(str(last / TRAINER_STATE_NAME))
        trained = sum(value.numel() for value in loaded.parameters() if value.requires_grad)
        outcome = Trained(
            config=options.config,
            items=len(dataset),
            steps=trainer.state.global_step,
            parameters=trained,
            share=trained / (sum(value.numel() for value in loaded.parameters()) - trained),
            log=tuple(line for line in trainer.state.log_history if "loss" in line),
            files=tuple(output / name for name in NAMES),
            cost=costs[0],
        )
        cost = {**asdict(outcome.cost), "steps": outcome.steps - first_step, "device": target}
        settings["options"].pop("config")  # which stands beside
        training = {
            "items": outcome.items,
            "tasks": Counter(item.task for item in items),
            "data": digest,
            "steps": outcome.steps,
            "parameters": outcome.parameters,
            "share": outcome.share,
            "options": settings["options"],
        }
        with whole_folder(output, NAMES, overwrite) as folder:
            write_adapters(loaded, folder, source.label, training)
            # as the Trainer keeps them
            lines = (json.dumps(plain_json(line), sort_keys=True) + "\n" for line in outcome.log)
            (folder / LOG).write_text("".join(lines), encoding="utf-8")
            (folder / COST).write_text(json.dumps(plain_json(cost)) + "\n", encoding="utf-8")
        shutil.rmtree(run, ignore_errors=True)
    return outcome


def _last_checkpoint(run: Path, settings: str) -> Path | None:
    """The last whole checkpoint of an earlier run with these settings; what another run has left is
    removed."""
    note = run / "settings.json"
    if not note.is_file() or note.read_text(encoding="utf-8") != settings:
        clear(run)
        run.mkdir(exist_ok=True)
        note.write_text(settings, encoding="utf-8")
    while last := get_last_checkpoint(str(run)):
        if json_object(Path(last) / TRAINER_STATE_NAME):  # what the Trainer writes last
            return Path(last)
        shutil.rmtree(last)  # a kill came while it was written
    return None
