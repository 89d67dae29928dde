"""Plans for GGUF models: made from an importance matrix of llama.cpp, or made elsewhere and fitted
to the file.

`llama-imatrix` writes GGUF files, in which each weight W that was multiplied has `W.in_sum2` [E,
in], the sums of the squares of its inputs, and `W.counts` [E, 1], the rows that were seen."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.files import file_digest
from compressor.formatting import known_names
from compressor.gguf_files.blocks import DOWN, FINGERPRINT, GATE, Blocks
from compressor.gguf_files.header import Gguf, GgufTensor, read_header, type_name, type_sizes
from compressor.model.moe_layer import MoeLayer, resolve_count
from compressor.model.opened import open_model
from compressor.recipe.plan import ExpertPlan, LayerPlan, Source
from compressor.recipe.steps_plan import PRUNE, Plan, PlannedStep
from compressor.run_record import PACKAGES, versions
from compressor.statistics.statistics import LayerStatistics
from compressor.steps.prune.options import protector_of
from compressor.steps.prune.protection import given_protected, listed, with_list
from compressor.steps.prune.selection import keep_best, kept_share

logger = logging.getLogger(__name__)

# what decides in a head for further tokens, which no imatrix has seen
HEAD = "down_projection_norm"
ROUNDING = 2.0**-7  # of the largest entry: a router that was stored in bfloat16
SAME = "The routers are those of the plan's source"
DIFFERENT = (
    "The routers are not those of the plan's source: {} differs by {:.2g} of its largest entry, "
    "so the plan may keep "
    "the wrong experts"
)
UNCHECKED = (
    "A plan made on a checkpoint does not record its weights, and that checkpoint is not "
    "available, so only layers, "
    "experts and top-k were compared with the file: make sure that it was converted from the "
    "plan's source"
)
MATCH = "apply it to the GGUF file of the same model"
Numbers = npt.NDArray[np.float64]
ENERGY = "imatrix-energy"
COUNTS = "count-guided"
FLOAT32 = 0  # the number of this type in GGUF


@dataclass(frozen=True, slots=True)
class Imatrix:
    """An importance matrix on disk."""

    path: Path
    tensors: Mapping[str, GgufTensor]  # W.in_sum2 and W.counts

    def read(self, name: str, experts: int, width: int) -> Numbers:
        """The numbers of a tensor as [E, width]."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CompressionError(f"{self.path} has no {name}; make an imatrix of this very model")
        if tensor.parameters != experts * width:
            counts = (
                f"{name} has {tensor.parameters:,} numbers, {experts} experts need "
                f"{experts * width:,}"
            )
            raise CompressionError(f"{self.path}: {counts}; make an imatrix of this very model")
        numbers = np.frombuffer(tensor.read(), "<f4").astype(np.float64)
        if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
            raise CompressionError(
                f"{self.path}: {name} has numbers that are no sums of squares; make it again"
            )
        return numbers.reshape(experts, width)


def read_imatrix(path: Path) -> Imatrix:
    """Find the tensors of an importance matrix; raises `CompressionError` for a file that is
    none."""
    header = read_header(path)
    if header.text("general.type") != "imatrix":
        raise CompressionError(
            f"--imatrix {path} is a GGUF file, but no importance matrix; make one by llama-imatrix"
        )
    return Imatrix(
        path, {tensor.name: tensor for tensor in header.tensors if tensor.kind == FLOAT32}
    )


def count_scores(model: Gguf, layer: MoeLayer, imatrix: Imatrix) -> torch.Tensor:
    """Tokens routed to each expert: [E] (He et al. 2024, arXiv:2406.02500)."""
    return torch.from_numpy(
        imatrix.read(f"{DOWN.format(layer.index)}.counts", layer.experts, 1)[:, 0].copy()
    )


def energy_scores(model: Gguf, layer: MoeLayer, imatrix: Imatrix) -> torch.Tensor:
    """Energy of each expert's outputs, its neurons taken as uncorrelated: [E].

    score_e = sum_n s_en * ||W_e[:, n]||^2, where s_en is the sum over the tokens routed to expert e
    of the square of neuron n's input to the down projection W_e [out, n]: the outputs' squared
    norms without products of different neurons, the projection's bias, and gate weights, which an
    imatrix does not have."""
    down = model.tensors[DOWN.format(layer.index)]
    squares = imatrix.read(f"{down.name}.in_sum2", layer.experts, down.shape[-1])
    return torch.from_numpy((squares * column_norms(model, layer)).sum(1))


SCORES: dict[str, Callable[[Gguf, MoeLayer, Imatrix], torch.Tensor]] = {
    ENERGY: energy_scores,
    COUNTS: count_scores,
}


def column_norms(model: Gguf, layer: MoeLayer) -> Numbers:
    """Squared norm of each neuron's column of the dequantised down projections: [E, n]; one expert
    in memory."""
    down = model.tensors[DOWN.format(layer.index)]
    size = down.nbytes // layer.experts
    norms = np.empty((layer.experts, down.shape[-1]))
    for expert in range(layer.experts):
        weight = dequantised(down, expert * size, size)
        norms[expert] = np.einsum("on,on->n", weight, weight, dtype=np.float64)
    # what each expert is multiplied by
    scale = model.tensors.get(down.name.replace(".weight", ".scale"))
    if scale is not None:
        norms *= dequantised(scale).reshape(-1, 1).astype(np.float64) ** 2
    if not np.isfinite(norms).all():
        raise CompressionError(
            f"{down.name} has weights that are no numbers; download or convert the file again"
        )
    return norms


def dequantised(
    tensor: GgufTensor, begin: int = 0, nbytes: int | None = None
) -> npt.NDArray[np.float32]:
    """Rows of a tensor, from the byte `begin` on, in float32: [rows, in]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    block, block_bytes = type_sizes()[tensor.kind]
    row = tensor.shape[-1] // block * block_bytes
    try:
        # of scales: the caller refuses infinite weights
        with np.errstate(over="ignore", invalid="ignore"):
            raw = np.frombuffer(tensor.read(begin, nbytes), np.uint8)
            values = dequantize(raw.reshape(-1, row), GGMLQuantizationType(tensor.kind))
    except NotImplementedError as error:
        kind = f"{type_name(tensor.kind)}, which the package gguf does not dequantise"
        raise CompressionError(f"{tensor.name} is {kind}; choose --strategy {COUNTS}") from error
    return np.asarray(values, np.float32)


def imatrix_plan(
    blocks: Blocks,
    matrix: str | Path | None,
    experts: int | None,
    ratio: float | None,
    strategy: str = "auto",
    protect: str | Sequence[Mapping[str, Any]] | None = None,
) -> Plan:
    """A plan that keeps in each block the experts of highest score; `auto` is `imatrix-energy`.

    Protected experts come as a list, or a file with one, with `layer` and `expert`; its modules are
    not looked at."""
    name = ENERGY if strategy == "auto" else strategy
    if name not in SCORES:
        raise CompressionError(
            f"no strategy {name!r} works on GGUF files; {known_names(name, SCORES)}"
        )
    if matrix is None:
        raise CompressionError(
            "a GGUF file is compressed by an importance matrix; give --imatrix FILE of "
            "llama-imatrix, or apply a plan "
            "that was made on the checkpoint: moe-compress apply plan.json --model "
            f"{blocks.model.first.path.name}"
        )
    imatrix = read_imatrix(Path(matrix))
    keep = resolve_count(blocks.layers, experts, ratio)
    check_llama_cpp(blocks, keep)
    if protector_of(protect) is not None:
        raise CompressionError(
            f"--protect {protect} needs a checkpoint and text; name a JSON list of experts"
        )
    entries = list[Any]()
    for entry in with_list(protect) or ():
        entries.append({**entry, "module": None} if isinstance(entry, dict) else entry)
    protected = given_protected(entries, blocks.layers, keep)
    layers = list[LayerPlan]()
    for layer in blocks.layers:
        kept_whole = protected.get(layer.name, frozenset())
        if (
            layer.index in blocks.heads
            and f"{DOWN.format(layer.index)}.in_sum2" not in imatrix.tensors
        ):
            layers.append(head_plan(blocks.model, layer, keep, kept_whole))
            continue
        scores = SCORES[name](blocks.model, layer, imatrix)
        plan = keep_best(LayerStatistics(layer), scores, keep, kept_whole, decided_by=name)
        layers.append(replace(plan, figures={"kept_share": kept_share(plan, scores)}))
    source = Source(blocks.model.first.path.name, None, blocks.fingerprint)
    data = {"source": imatrix.path.name, "sha256": file_digest(imatrix.path)}
    decision = ExpertPlan(keep, tuple(layers), listed(protected))
    step = PlannedStep(PRUNE, {"strategy": name, "experts": keep}, decision)
    return Plan(source, (step,), data, versions=versions((*PACKAGES[:2], "gguf")))


def head_plan(
    model: Gguf, layer: MoeLayer, keep: int, protected: frozenset[int] = frozenset()
) -> LayerPlan:
    """Keep the experts of a head for further tokens with the largest down projections, for nothing
    else is known."""
    logger.warning(
        "%s predicts further tokens and nothing is known of its experts, so those with the "
        "largest down projections "
        "are kept; convert the model without it (--no-mtp) if you do not decode speculatively",
        layer.name,
    )
    norms = torch.from_numpy(column_norms(model, layer).sum(1))
    return keep_best(LayerStatistics(layer), norms, keep, protected, decided_by=HEAD)


def check_llama_cpp(blocks: Blocks, keep: int) -> None:
    """Refuse a number of experts at which llama.cpp stops: no more than one for each of the groups
    it reads."""
    if keep <= blocks.model.first.number(f"{blocks.arch}.expert_group_count"):
        raise CompressionError(
            f"llama.cpp runs {blocks.arch} with at least 2 experts in a group; keep more than "
            f"{keep}"
        )


def fit_plan(plan: Plan, blocks: Blocks) -> Plan:
    """A plan of one step, with the blocks of a GGUF file in place of its layers, matched by number.

    Several steps that prune become one. Raises `CompressionError` for a plan that does more than
    drop, or that names another model."""
    refuse_more_than_drop(plan)
    if (
        plan.source.fingerprint.startswith(FINGERPRINT)
        and plan.source.fingerprint != blocks.fingerprint
    ):
        raise CompressionError(
            "the plan was made for another GGUF model: the routers differ; plan again for this one"
        )
    expert_plan = plan.expert_plan
    by_number = {layer.layer: layer for layer in expert_plan.layers}
    if len(by_number) != len(expert_plan.layers):
        raise CompressionError(
            "the plan has two MoE modules in one decoder layer, which no GGUF file has; plan again"
        )
    known = {layer.index for layer in blocks.layers}
    file = blocks.model.first.path.name
    for number in by_number.keys() - known:
        raise CompressionError(
            f"the plan speaks of layer {number}, which has no experts in {file}; {MATCH}"
        )
    if expert_plan.budget is not None:
        raise CompressionError(
            "layers of the plan keep different numbers of experts, and a GGUF file has one for all"
        )
    check_llama_cpp(blocks, expert_plan.experts)
    layers = list[LayerPlan]()
    protected = dict[str, tuple[int, ...]]()
    for layer in blocks.layers:
        planned = by_number.get(layer.index)
        if planned is None:
            if layer.index not in blocks.heads:
                raise CompressionError(f"the plan has no entry for {layer.name} of {file}; {MATCH}")
            layers.append(head_plan(blocks.model, layer, expert_plan.experts))
            continue
        for fact in ("experts", "top_k"):
            stated = getattr(planned, fact)
            actual = getattr(layer, fact)
            if stated != actual:
                raise CompressionError(
                    f"{planned.module}: the plan says {fact} {stated}, {layer.name} has {actual}; "
                    f"{MATCH}"
                )
        kept = [group.members[0] for group in planned.groups]
        layers.append(
            LayerPlan.keep(
                layer,
                kept,
                upstream=planned.upstream,
                decided_by=planned.decided_by,
                figures=planned.figures,
            )
        )
        if planned.module in expert_plan.protected:
            protected[layer.name] = expert_plan.protected[planned.module]
    fitted = replace(expert_plan, layers=tuple(layers), protected=protected)
    return replace(plan, steps=(replace(plan.of(PRUNE)[-1], decision=fitted),))


def refuse_more_than_drop(plan: Plan) -> None:
    """Refuse what needs weights as plain numbers, and a plan that has not decided."""
    names = [step.name for step in plan.steps if step.name != PRUNE]
    names += ["split"] * bool(plan.split) + ["correct"] * bool(plan.correction)
    other = next(iter(names), None)
    merged = next((layer.module for layer in plan.expert_plan.layers if not layer.is_drop), None)
    if other is not None or merged is not None:
        what = f"has the step {other}" if other is not None else f"merges experts ({merged})"
        raise CompressionError(
            f"the plan {what}, which needs the weights as plain numbers, and a GGUF file is only "
            "cut; apply it to "
            "the checkpoint and convert the result, or plan with a strategy that only drops "
            "(--split 1 --correct none)"
        )
    if not all(step.decision for step in plan.of(PRUNE)) or not plan.steps:
        raise CompressionError(
            "the plan does not say which experts stay; make it by moe-compress plan"
        )


def compare_routers(planned: Source, model: Gguf) -> str:
    """Return a note on the match; empty for a plan that was made on a GGUF file, and is checked
    already.

    Where the plan's source is an unchanged folder of this machine, its routers [E, hidden] are
    compared. A difference is no error: a model that was trained further may fit the plan as well.
    """
    if planned.fingerprint.startswith(FINGERPRINT):
        return ""
    if planned.revision is not None or not Path(planned.model).is_dir():
        return UNCHECKED
    try:
        source = open_model(locate(planned.model), device="cpu")
    except CompressionError as error:
        logger.debug("the plan's source cannot be read: %s", error)
        return UNCHECKED
    if source.fingerprint != planned.fingerprint:
        return UNCHECKED
    largest = 0.0
    worst = ""
    for layer in source.architecture.layers:
        name = GATE.format(layer.index)
        weights = []
        for key, role in source.layout.roles.items():
            if (
                role.is_router
                and role.layer == layer.name
                and len(source.checkpoint.tensors[key].shape) == 2
            ):
                weights.append(key)
        if len(weights) != 1:  # by which the experts are scored
            return UNCHECKED
        wanted = source.checkpoint.read(weights[0]).double().numpy()
        router = dequantised(model.tensors[name]).astype(np.float64)
        if router.shape != wanted.shape:
            shapes = (
                f"{name} has the shape {list(router.shape)}, the plan's source {list(wanted.shape)}"
            )
            raise CompressionError(f"{shapes}; {MATCH}")
        difference = float(np.abs(router - wanted).max() / max(np.abs(wanted).max(), 1e-30))
        if not difference <= largest:
            largest = difference
            worst = name
    return SAME if largest <= ROUNDING else DIFFERENT.format(worst, largest)
