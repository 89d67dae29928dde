"""transformers' Trainer with the contrastive loss beside the cross entropy (CoMoE, equation 13).

Importing this module imports transformers' Trainer; only functions that train do so.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from compressor.comoe.adapters import TENSORS, adapter_tensors, put_tensors
from compressor.comoe.layer import comoe_layers, model_contrast, watching
from compressor.comoe.options import TuningOptions
from compressor.errors import CompressionError
from compressor.progress import Progress
from compressor.steps.distill.contrastive import information_gap

PRIME = 1_000_003  # spreads the seeds of a run's batches


class ComoeTrainer(Trainer):
    """Cross entropy + weight * contrastive loss; both, and the gap's lower bound log N - L, are logged.

    With a weight (`options.contrastive`) of 0 the contrastive loss is measured without a gradient, and the training is
    plain tuning. Anchors are drawn from (seed, step, batch within it), so that a resumed run draws them again.
    Checkpoints hold the adapters alone. Raises `CompressionError` at the first loss that is no number.
    """

    def __init__(self, model: Any, args: Any, *, options: TuningOptions, **more: Any) -> None:
        super().__init__(model, args, **more)
        self.options, self.weight = options, options.contrastive
        self.experts_beside = comoe_layers(model)
        first = next(iter(self.experts_beside.values()))
        self.negatives = first.router.shape[0] - first.top_k
        self.measures = first.top_k > 1 and self.negatives > 0  # else no contrastive loss is defined
        self._parts: dict[str, Tensor] = {}  # sums over the steps since the last log
        self._steps_since, self._step, self._batch = 0, -1, 0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """What a batch adds to its step's loss, as the stock method gives it, and the weighted contrastive loss."""
        if self.state.global_step != self._step:
            self._step, self._batch = self.state.global_step, -1
            self._steps_since += 1
        self._batch += 1
        term: Tensor | None = None
        with watching(self.experts_beside if self.measures else {}):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            if self.measures:
                seed = (self.args.seed * PRIME + self.state.global_step) * PRIME + self._batch
                generator = torch.Generator().manual_seed(seed % 2**63)
                layers, mask = self.experts_beside.values(), inputs.get("attention_mask")
                temperature, tokens = self.options.temperature, self.options.contrastive_tokens
                with torch.set_grad_enabled(self.weight > 0 and torch.is_grad_enabled()):
                    term = model_contrast(layers, mask, temperature, tokens, generator)
        # a model that is told the step's number of answer tokens divides by it; else the Trainer divides by the batches
        batches = int(self.current_gradient_accumulation_steps)
        divided = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        self._add("cross_entropy", loss if divided else loss / batches)
        if term is not None:
            self._add("contrastive", term / batches)
            if self.weight > 0:
                loss = loss + self.weight * (term / batches if divided else term)
        if not bool(loss.isfinite()):
            raise CompressionError(
                f"the loss is {float(loss)} at step {self.state.global_step + 1}; lower --learning-rate, or check the "
                "model with --dtype float32"
            )
        return (loss, outputs) if return_outputs else loss

    def _add(self, name: str, value: Tensor) -> None:
        self._parts[name] = self._parts.get(name, 0) + value.detach()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The stock figures with the parts of the loss, means over the steps since the last time."""
        if "loss" in logs and self._steps_since:
            logs |= {name: float(total) / self._steps_since for name, total in self._parts.items()}
            if "contrastive" in logs:
                logs["information_gap"] = information_gap(logs["contrastive"], self.negatives)
            self._parts, self._steps_since = {}, 0
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(adapter_tensors(self.model), folder / TENSORS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        put_tensors(self.model, load_file(Path(resume_from_checkpoint) / TENSORS))

    def finish_from(self, checkpoint: Path) -> None:
        """Adapters and log of a checkpoint, without training."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))


class Told(TrainerCallback):
    """Tells a listener of each step, and sees that the last one is logged."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.progress.start("Training", state.max_steps)
        for _ in range(state.global_step):
            self.progress.advance("")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        last = next((line for line in reversed(state.log_history) if "loss" in line), None)
        self.progress.advance(f"loss {last['loss']:.4f}" if last else "")
        control.should_log |= state.global_step >= state.max_steps
