"""Output-space correction of one cut layer: the remaining experts refitted toward the base layer's
output.

`ridge` refits the down projections in closed form; `tune` continues from there with optimiser steps
on router, gate, up and down. A guard keeps only what lowers the reconstruction error on held-out
calibration tokens."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from compressor.distributed import ranks
from compressor.model.loading import set_tensor
from compressor.model.moe_layer import MoeLayer
from compressor.progress import SILENT, Progress
from compressor.steps.correct.cut_layer import CutLayer, Recording, RefittedConstants
from compressor.steps.correct.options import NONE, Correct
from compressor.steps.correct.ridge import refit_constants, refit_down
from compressor.steps.correct.tuning import tune

MOST_RATE = 0.03
ROUNDS = 3  # of ridge with weights of sources, after the one without
STEPS_OF: Mapping[str, tuple[str, ...]] = {  # of each method; a step that lowers no error is undone
    NONE: (),
    "ridge": ("ridge",),
    "tune": ("ridge", "tune"),
}


@contextmanager
def float_router(model: Any, layer: MoeLayer, recording: Recording) -> Iterator[dict[str, Tensor]]:
    """The smaller router in float32 while the block runs; yields its expert-sized tensors that may
    be tuned, by key.

    Afterwards these are back in their own dtype with their new values, the others as they were.
    """
    block_keys = [
        f"{layer.block}.{argument.key}"
        for argument in recording.arguments
        if argument.key is not None
    ]
    state = model.get_submodule(layer.router).state_dict(prefix=f"{layer.router}.", keep_vars=True)
    state |= {key: attrgetter(key)(model) for key in block_keys}
    before = {key: value for key, value in state.items() if value.is_floating_point()}
    for key, value in before.items():
        set_tensor(model, key, value.detach().to(torch.float32, copy=True))
    sized = {tensor.key for tensor in layer.tensors}
    tuned = {
        key: attrgetter(key)(model)
        for key, value in before.items()
        if key in sized and isinstance(value, torch.nn.Parameter)
    }
    try:
        yield tuned
    finally:
        for key, value in before.items():
            set_tensor(model, key, tuned[key].detach().to(value.dtype) if key in tuned else value)


class _Guard:
    """Keeps the best state by the error on held-out tokens, as it will be stored: in the smaller
    model itself."""

    def __init__(
        self,
        cut: CutLayer,
        heldout: Tensor,
        router: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        writing: torch.dtype | None,
    ) -> None:
        self.cut = cut
        self.heldout = heldout
        self.computing: torch.dtype = next(cut.experts.parameters()).dtype
        self.writing = writing or self.computing
        # every refitted tensor and where its best values are: the experts' in the smaller model,
        # the router's here
        self.best_values = list[tuple[Tensor, Tensor]]()
        for group in cut.groups:  # so that rounding takes little memory
            for name, value in cut.parameters.items():
                self.best_values.append((value[group], getattr(cut.experts, name)[group].detach()))
        if cut.constants is not None:
            self.best_values.append((cut.constants.values, cut.constants.best))
        for key, value in router.items():
            self.best_values.append((value, self._stored(value.detach(), dtypes[key]).clone()))
        self.kept = NONE
        self.best = self._error()

    def _stored(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a value rounded as writing will: what is computed in one dtype may be stored in
        another."""
        return value.to(self.writing if dtype == self.computing else dtype).to(dtype)

    @torch.no_grad()
    def _error(self) -> float:
        """Return the error with all values rounded as they will be stored; they stay so."""
        for value, best in self.best_values:
            value.copy_(self._stored(value, best.dtype))
        return self.cut.error(self.heldout)

    @torch.no_grad()
    def evaluate(self, name: str) -> float:
        """Keep the present state if it is better than the best so far, and go back to the best;
        returns its error."""
        error = self._error()
        is_better = error < self.best
        if is_better:
            self.kept = name
            self.best = error
        for value, best in self.best_values:
            if is_better:
                best.copy_(value)
            else:
                value.copy_(best)
        return error


def correct_layer(
    model: Any,
    layer: MoeLayer,
    recording: Recording,
    correction: Correct,
    seed: int = 0,
    writing: torch.dtype | None = None,
    constants: RefittedConstants | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Refit a layer of the smaller `model`, and its constants, in place toward the recorded
    outputs; returns figures.

    Values are rounded to the dtype of `writing` (by default the experts' own) before they're
    evaluated and kept. Errors are shares of the base output's energy that is missed on held-out
    calibration tokens, each token weighted (`CutLayer.error`). A layer that none reached stays as
    it is."""
    fit = recording.positions(heldout=False)
    heldout = recording.positions(heldout=True)
    fitted, evaluated = ranks().all_reduce(torch.tensor([len(fit), len(heldout)])).tolist()
    if not evaluated:
        return {"kept": NONE, "reason": "no calibration token reached the layer"}
    experts = model.get_submodule(layer.name)
    block = model.get_submodule(layer.block)
    dtypes = {key: value.dtype for key, value in model.state_dict().items()}
    with float_router(model, layer, recording) as router:
        cut = CutLayer(recording, experts, model.get_submodule(layer.router), block, constants)
        guard = _Guard(cut, heldout, router, dtypes, writing)
        errors = {"before": guard.best}
        steps = STEPS_OF[correction.method]
        leaves = list(router.values())
        if constants is not None:
            steps = ("constants", *steps)
            leaves.append(constants.values)
        for name in steps if guard.best > 0 and fitted else ():
            if name == "tune":
                # large steps only disturb a layer that is close
                rate = min(correction.rate * guard.best, MOST_RATE)
                # auto is bfloat16 where tensor cores take it
                is_narrow = correction.precision == "bfloat16"
                if correction.precision == "auto" and recording.inputs.device.type == "cuda":
                    is_narrow = torch.cuda.is_bf16_supported(including_emulation=False)
                dtype = torch.bfloat16 if is_narrow else torch.float32
                progress.start(f"tune {layer.name}", correction.steps)
                tune(
                    cut,
                    fit,
                    leaves,
                    correction.steps,
                    correction.tokens,
                    rate,
                    seed,
                    dtype,
                    progress,
                )
            if name == "ridge":
                refit_down(cut, fit, heldout)
            if name != "tune" and constants is not None:
                refit_constants(cut, fit, heldout)
            errors[name] = guard.evaluate(name)
            for _ in range(ROUNDS if name == "ridge" and len(cut.source_weights) > 1 else 0):
                cut.rebalance()
                refit_down(cut, fit, heldout)
                errors[name] = min(errors[name], guard.evaluate(name))
    tried = {f"heldout_error_{name}": round(error, 6) for name, error in errors.items()}
    return {"kept": guard.kept, "heldout_error": round(guard.best, 6), **tried}
