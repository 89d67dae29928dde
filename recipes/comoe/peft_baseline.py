"""One LoRA or DoRA of peft, trained and asked as CoMoE's experts are: the baselines of tables 1, 2 and 8."""

from pathlib import Path
from typing import Any

import peft
from transformers import PrinterCallback, Trainer

from compressor.answers.asking import ask, pad_token, with_rows
from compressor.answers.tasks import items_of
from compressor.checkpoint.source import locate
from compressor.comoe.cost import Cost, answering_cost, measured
from compressor.comoe.evaluating import collate, examples, load
from compressor.comoe.options import TuningOptions
from compressor.comoe.training import training_arguments
from compressor.devices import pick_device
from compressor.progress import quiet_transformers


def tune_by_peft(
    model: str,
    method: str,
    options: TuningOptions,
    training: dict[str, Any],
    asked: dict[str, Any],
    timed_tokens: int,
    folder: Path,
    device: str,
    dtype: str,
) -> tuple[dict[str, float], float, Cost, Cost | None]:
    """Return accuracies by task, the share of trained parameters, and the costs of training and of answers."""
    tokenizer, base = load(locate(model), dtype)
    config = options.config
    adapted = peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=2.0 * config.rank if config.alpha is None else config.alpha,
            lora_dropout=config.dropout,
            target_modules=[*config.targets],
            use_dora={"lora": False, "dora": True}[method],
        ),
    )
    trained, whole = adapted.get_nb_trainable_parameters()
    data: Any = examples(
        with_rows(items(training, True), adapted, tokenizer, cutoff=options.cutoff)
    )
    target = pick_device(device)
    arguments = training_arguments(options, len(data), folder, target.type == "cpu")
    arguments.save_strategy = "no"
    pad = pad_token(tokenizer)
    trainer = Trainer(
        adapted, arguments, train_dataset=data, data_collator=lambda batch: collate(batch, pad)
    )
    trainer.remove_callback(PrinterCallback)
    with quiet_transformers(), measured(target) as costs:
        trainer.train()
    heldout = items(asked, False)
    scores = ask(adapted, tokenizer, heldout)
    accuracy = {score.task: score.accuracy for score in scores}
    answering = (
        answering_cost(adapted, tokenizer, heldout, 16, timed_tokens) if timed_tokens else None
    )
    return accuracy, trained / (whole - trained), costs[0], answering


def items(named: dict[str, Any], training: bool) -> Any:
    """Return the items that a recipe trains on or asks."""
    file = named.get("calibration", named.get("heldout"))
    options = (named.get("tasks", ()), file, named.get("limit"), named.get("include_path"), False)
    return items_of(*options, training=training)
