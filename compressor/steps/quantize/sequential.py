"""Layers in order, each quantised by GPTQ on the quantised earlier layers' outputs for the
calibration text.

Of a layer, dense matrices come first, all on the inputs that they have now; then the experts, some
at a time, on the tokens that are routed to them: gate and up together, and then down on what the
rounded gate and up give it. Tokens wait as they are, so that few experts' Hessians exist at a time.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.model.experts import expert_parameters, intermediate, moe_hooks
from compressor.model.loading import set_tensor
from compressor.model.moe_layer import MoeLayer
from compressor.model.streaming import LayerVisitor, Pass, Replay
from compressor.progress import Progress
from compressor.steps.correct.cut_layer import Rows
from compressor.steps.quantize.gptq import gptq, inverse_factor
from compressor.steps.quantize.matrices import Matrix
from compressor.steps.quantize.scheme import Scales, labels
from compressor.steps.quantize.writing import Writer, largest_weights
from compressor.tensor_cache import load_tensors, save_tensors

HESSIANS = 2**25  # bytes of Hessians that exist at a time, but for a single one
# of those on an accelerator, where a column of many matrices takes as long as that of one
ON_DEVICE = 2**31
CHUNK = 4096  # tokens whose outer products are added up at once
# Tokens for each column of down. With fewer, GPTQ's error on other text is larger than that of
# rounding to nearest: measured in four layers of a model of 20 experts, 1.2 times at 2 a column,
# 0.9 at 4, 2.2 at a half. For gate and up, whose inputs are more alike, it was smaller at any.
TOKENS = 3


def rows_by_expert(index: Tensor, experts: int) -> Sequence[Tensor]:
    """Return the rows [n] of each expert's tokens among the chosen experts [T, K], -1 for an unused
    choice; a token counts once even if it chose an expert twice."""
    tokens = max(1, len(index))
    pairs = index.long() * tokens + torch.arange(len(index), device=index.device)[:, None]
    pairs = pairs[index >= 0].unique()
    counts = (pairs // tokens).bincount(minlength=experts)
    rows: Sequence[Tensor] = (pairs % tokens).split(counts.tolist())
    return rows


def summed(hessians: Tensor, matrices: Sequence[Matrix]) -> Tensor:
    """Return the sums of all processes' Hessians [B, I, I]; raises `CompressionError` if one is not
    finite."""
    totals = ranks().all_reduce(hessians)
    finite = totals.isfinite().flatten(1).all(1).tolist()
    if not all(finite):
        raise CompressionError(
            f"{matrices[finite.index(False)].module}: its inputs are not finite on the "
            "calibration text; try --dtype float32"
        )
    return totals


class Quantizing(LayerVisitor):
    """Quantises each layer before the batches pass it."""

    def __init__(self, writer: Writer, calibration: Calibration) -> None:
        self.writer = writer
        self.calibration = calibration

    def before_layer(self, decoder_layer: str, replay: Replay) -> None:
        live = self.at.model
        matrices = self.writer.matrices.of(decoder_layer)
        if not matrices:
            return
        # loaded tensors may be the files' own
        for key in dict.fromkeys(matrix.key for matrix in matrices):
            set_tensor(live, key, live.get_parameter(key).detach().clone())
        file, facts = self.writer.kept_file(decoder_layer)
        if facts is not None:
            tensors = load_tensors(file)
            for matrix in matrices:
                names = self.writer.stored(matrix)
                stored = {name: tensors[f"{matrix.module}.{name}"] for name in names}
                matrix.of(live).copy_(self.writer.scheme(matrix).unpack(stored))
            return
        self.tensors = dict[str, Tensor]()  # of this layer
        schemes = self.writer.schemes[decoder_layer]
        self.largest = largest_weights(schemes, matrices, lambda matrix: matrix.of(live))
        batches = range(len(self.calibration.batches))
        dense = [matrix for matrix in matrices if matrix.expert is None]
        if dense:  # first, so that experts get inputs from the rounded ones
            self._quantize_dense(dense, partial(replay, batches))
        owners = {matrix.owner for matrix in matrices}
        layers = [layer for layer in self.at.moe_layers if layer.name in owners]
        # hidden states [T, H] at each layer's experts, and the chosen experts [T, K]
        states = {layer.name: Rows(self.calibration.tokens) for layer in layers}
        choices = {layer.name: Rows(self.calibration.tokens) for layer in layers}

        def called(name: str, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
            states[name].append(hidden)
            choices[name].append(index.masked_fill(weights == 0, -1))

        with ExitStack() as stack:
            for layer in layers:  # a single layer's output is not read
                record = partial(called, layer.name)
                hooks = moe_hooks(live, layer, on_experts=record, computing=len(layers) > 1)
                stack.enter_context(hooks)
            replay(batches)
        rounded = set[int]()
        for layer in layers:
            layer_matrices = [matrix for matrix in matrices if matrix.owner == layer.name]
            rows = rows_by_expert(choices.pop(layer.name).value, layer.experts)
            hidden = states.pop(layer.name).value
            rounded |= self._quantize_experts(layer, hidden, rows, layer_matrices)
        if ranks().is_first:
            facts = {"schemes": labels(schemes), "rounded": sorted(rounded)}
            save_tensors(file, self.tensors, facts)
        ranks().barrier()
        self.tensors.clear()

    def _quantize_dense(self, dense: Sequence[Matrix], run: Callable[[], None]) -> None:
        device = self.writer.model.partial.device
        totals = {}
        for matrix in dense:
            totals[matrix.owner] = torch.zeros(matrix.columns, matrix.columns, device=device)

        def called(name: str, module: Any, args: tuple[Any, ...]) -> None:
            for chunk in args[0].detach().flatten(0, -2).float().split(CHUNK):
                totals[name].addmm_(chunk.T, chunk)

        with ExitStack() as stack:
            for name in totals:
                module = self.at.model.get_submodule(name)
                stack.enter_context(module.register_forward_pre_hook(partial(called, name)))
            run()
        for matrix in dense:
            hessian = summed(totals[matrix.owner][None], [matrix])
            self._round([[matrix]], inverse_factor(hessian))

    def _quantize_experts(
        self,
        layer: MoeLayer,
        hidden: Tensor,
        rows: Sequence[Tensor],
        matrices: Sequence[Matrix],
    ) -> set[int]:
        """Quantise a layer's experts; return those that saw too little text for down to be more
        than rounded to nearest."""
        experts = self.at.model.get_submodule(layer.name)
        device = self.writer.model.partial.device
        by_part = {(matrix.expert, matrix.part): matrix for matrix in matrices}
        most = max(matrix.columns for matrix in matrices)
        at_once = max(1, (HESSIANS if device.type == "cpu" else ON_DEVICE) // (4 * most**2))
        inner = ("gate", "up") if experts.has_gate else ("up",)
        tokens = ranks().all_reduce(torch.tensor([len(indices) for indices in rows], device=device))
        few = tokens < TOKENS * by_part[0, "down"].columns
        for numbers in torch.arange(layer.experts).split(at_once):
            batch = numbers.tolist()
            for parts in (inner, ("down",)):
                same_inputs = []
                for part in parts:
                    same_inputs.append([by_part[expert, part] for expert in batch])
                columns = same_inputs[0][0].columns
                hessians = torch.zeros(len(batch), columns, columns, device=device)
                for total, expert in zip(hessians, batch, strict=True):
                    # none: no width, either
                    for chunk in rows[expert].split(CHUNK) if len(rows[expert]) else ():
                        inputs = hidden.index_select(0, chunk)
                        if parts == ("down",):
                            inputs = inputs.to(experts.down_proj.dtype)
                            parameters = expert_parameters(experts, expert)
                            inputs = intermediate(experts, parameters, inputs)
                        inputs = inputs.float()
                        total.addmm_(inputs.T, inputs)
                total = summed(hessians, same_inputs[-1])
                nearest = few[numbers.to(device)] if parts == ("down",) else None
                self._round(same_inputs, inverse_factor(total), nearest)
        return {*few.nonzero().flatten().tolist()}

    def _round(
        self, parts: Sequence[Sequence[Matrix]], upper: Tensor, nearest: Tensor | None = None
    ) -> None:
        """Round matrices, put their values into the live model, and keep them as they are stored.

        Each part has B matrices, of which the first, second and so on have the same inputs, with
        the factor `upper` [B, I, I]; those of `nearest` [B] are rounded to nearest."""
        scheme = self.writer.scheme(parts[0][0])
        dtype = self.writer.dtype
        weights = []
        for matrices in parts:
            weights.append(torch.stack([matrix.of(self.at.model).float() for matrix in matrices]))
        weight = torch.cat(weights, dim=1)
        shared = None
        if scheme.name == "nvfp4":
            shared = torch.cat([self.largest[matrix.together] for matrix in parts[0]])
        scales = scheme.scales(weight, dtype, clip=True, largest=shared)
        codes = gptq(scheme, weight, scales, upper)
        if nearest is not None:
            simple = scheme.codes(weight, scales).to(codes.dtype)
            codes = torch.where(nearest[:, None, None], simple, codes)
        begin = 0
        for matrices in parts:
            rows = slice(begin, begin + matrices[0].rows)
            begin = rows.stop
            own_codes = codes[:, rows].contiguous()
            own_scales = Scales(scales.groups[:, rows], scales.overall)
            values = scheme.values(own_codes, own_scales).to(dtype)
            stored = scheme.pack(own_codes, own_scales, dtype)
            on_cpu = {name: value.cpu() for name, value in stored.items()}
            for number, matrix in enumerate(matrices):
                matrix.of(self.at.model).copy_(values[number])
                self.tensors |= {
                    f"{matrix.module}.{name}": value[number] for name, value in on_cpu.items()
                }


def quantize_sequentially(
    writer: Writer, calibration: Calibration, progress: Progress, seed: int
) -> dict[str, list[int]]:
    """Quantise all layers by GPTQ in one pass over calibration text; return by decoder layer the
    experts whose down was rounded to nearest, as they saw too little of it.

    Layers that are kept already are not made again.
    """
    layer_names = dict.fromkeys(matrix.decoder_layer for matrix in writer.matrices.every)
    text_pass = Pass(
        writer.model,
        calibration.batches,
        progress,
        "quantize",
        seed,
        wanted={*layer_names},
        shared=True,
    )
    with torch.no_grad():
        text_pass.run(Quantizing(writer, calibration))
    ranks().barrier()
    rounded = {}
    for layer in layer_names:
        _, facts = writer.kept_file(layer)
        assert facts is not None
        if facts["rounded"]:
            rounded[layer] = facts["rounded"]
    return rounded
