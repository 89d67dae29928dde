"""Plans for GGUF models: made from an importance matrix of llama.cpp, or made elsewhere and fitted
to the file.

`llama-imatrix` writes GGUF files, in which each weight W that was multiplied has `W.in_sum2` [E,
in], the sums of the squares of its inputs, and `W.counts` [E, 1], the rows that were seen."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.files import file_digest
from compressor.formatting import known_names
from compressor.gguf_files.blocks import DOWN, FINGERPRINT, GATE, Blocks, find_blocks
from compressor.gguf_files.header import Gguf, GgufTensor, Header, open_gguf, read_header
from compressor.model.moe_layer import MoeLayer, resolve_count
from compressor.model.opened import open_model
from compressor.recipe.plan import ExpertPlan, LayerPlan, Source
from compressor.recipe.steps_plan import PRUNE, Plan, PlannedStep
from compressor.run_record import PACKAGES, versions
from compressor.statistics.statistics import LayerStatistics
from compressor.steps.prune.options import protector_of
from compressor.steps.prune.planning import given_protected, listed, with_list
from compressor.steps.prune.selection import keep_best, kept_share

logger = logging.getLogger(__name__)

# what decides in a head for further tokens, which no imatrix has seen
HEAD = "down_projection_norm"
ROUNDING = 2.0**-7  # of the largest entry: a router that was stored in bfloat16
SAME = "The routers are those of the plan's source"
DIFFERENT = (
    "The routers are not those of the plan's source: {} differs by {:.2g} of its largest entry, "
    "so the plan may keep the wrong experts"
)
UNCHECKED = (
    "A plan made on a checkpoint does not record its weights, and that checkpoint is not "
    "available, so only layers, experts and top-k were compared with the file: make sure that it "
    "was converted from the plan's source"
)
MATCH = "apply it to the GGUF file of the same model"
Numbers = npt.NDArray[np.float64]
ENERGY = "imatrix-energy"
COUNTS = "count-guided"
COUNTED = re.compile(re.escape(f"{DOWN}.counts").replace(r"\{\}", r"(\d{1,4})"))
FLOAT32 = 0  # the number of this type in GGUF


def imatrix_numbers(imatrix: Header, name: str, experts: int, width: int) -> Numbers:
    """The numbers of a tensor of an importance matrix as [E, width]."""
    tensor = next((tensor for tensor in imatrix.tensors if tensor.name == name), None)
    if tensor is None or tensor.kind != FLOAT32:
        raise CompressionError(f"{imatrix.path} has no {name}; make an imatrix of this very model")
    if tensor.parameters != experts * width:
        raise CompressionError(
            f"{imatrix.path}: {name} has {tensor.parameters:,} numbers, {experts} experts need "
            f"{experts * width:,}; make an imatrix of this very model"
        )
    numbers = np.frombuffer(tensor.read(), "<f4").astype(np.float64)
    if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
        raise CompressionError(
            f"{imatrix.path}: {name} has numbers that are no sums of squares; make it again"
        )
    return numbers.reshape(experts, width)


def imatrix_scores(model: Gguf, layer: MoeLayer, imatrix: Header, strategy: str) -> torch.Tensor:
    """Scores of a layer's experts: [E].

    Of `count-guided` tokens routed to each (He et al. 2024, arXiv:2406.02500). Of `imatrix-energy`
    the energy of each expert's outputs, its neurons taken as uncorrelated: score_e = sum_n s_en *
    ||W_e[:, n]||^2, where s_en is the sum over the tokens routed to expert e of the square of
    neuron n's input to the down projection W_e [out, n]: the outputs' squared norms without
    products of different neurons, the projection's bias, and gate weights, which an imatrix does
    not have."""
    down = model.tensors[DOWN.format(layer.index)]
    if strategy == COUNTS:
        return torch.from_numpy(
            imatrix_numbers(imatrix, f"{down.name}.counts", layer.experts, 1)[:, 0].copy()
        )
    squares = imatrix_numbers(imatrix, f"{down.name}.in_sum2", layer.experts, down.shape[-1])
    return torch.from_numpy((squares * column_norms(model, layer)).sum(1))


def routed_counts(path: Path) -> dict[int, torch.Tensor]:
    """Return the tokens that were routed to each expert [E] by decoder layer, of an imatrix."""
    imatrix = read_header(path)
    counts = {}
    for tensor in imatrix.tensors:
        match = COUNTED.fullmatch(tensor.name)
        if match:
            numbers = imatrix_numbers(imatrix, tensor.name, tensor.parameters, 1)
            counts[int(match[1])] = torch.from_numpy(numbers[:, 0].copy())
    return counts


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
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row = tensor.shape[-1] // block * block_bytes
    try:
        # of scales: the caller refuses infinite weights
        with np.errstate(over="ignore", invalid="ignore"):
            raw = np.frombuffer(tensor.read(begin, nbytes), np.uint8)
            values = dequantize(raw.reshape(-1, row), kind)
    except NotImplementedError as error:
        raise CompressionError(
            f"{tensor.name} is {kind.name}, which the package gguf does not dequantise; choose "
            f"--strategy {COUNTS}"
        ) from error
    return np.asarray(values, np.float32)


def plan_gguf(
    model: str | Path,
    *,
    imatrix: str | Path | None,
    experts: int | None = None,
    ratio: float | None = None,
    strategy: str = "auto",
    protect: str | Sequence[Mapping[str, Any]] | None = None,
) -> Plan:
    """Plan which experts of a GGUF model stay, by an importance matrix of llama.cpp; nothing is
    written.

    Each block keeps the experts of highest score. `strategy` is `imatrix-energy` (which `auto`
    means) or `count-guided`; `protect` names experts that stay: a list, or a file with one, with
    `layer` and `expert`; its modules are not looked at."""
    blocks = find_blocks(open_gguf(model))
    first = blocks.model.first
    name = ENERGY if strategy == "auto" else strategy
    if name not in (ENERGY, COUNTS):
        raise CompressionError(
            f"no strategy {name!r} works on GGUF files; {known_names(name, (ENERGY, COUNTS))}"
        )
    if imatrix is None:
        raise CompressionError(
            "a GGUF file is compressed by an importance matrix; give --imatrix FILE of "
            "llama-imatrix, or apply a plan that was made on the checkpoint: moe-compress apply "
            f"plan.json --model {first.path.name}"
        )
    matrix = read_header(Path(imatrix))
    if matrix.text("general.type") != "imatrix":
        raise CompressionError(
            f"--imatrix {imatrix} is a GGUF file, but no importance matrix; make one by "
            "llama-imatrix"
        )
    keep = resolve_count(blocks.layers, experts, ratio)
    check_llama_cpp(blocks, keep)
    if protector_of(protect) is not None:
        raise CompressionError(
            f"--protect {protect} needs a checkpoint and text; name a JSON list of experts"
        )
    entries = [
        {**entry, "module": None} if isinstance(entry, dict) else entry
        for entry in with_list(protect) or ()
    ]
    protected = given_protected(entries, blocks.layers, keep)
    seen = {tensor.name for tensor in matrix.tensors}
    layers = list[LayerPlan]()
    for layer in blocks.layers:
        kept_whole = protected.get(layer.name, frozenset())
        if layer.index in blocks.heads and f"{DOWN.format(layer.index)}.in_sum2" not in seen:
            layers.append(head_plan(blocks.model, layer, keep, kept_whole))
            continue
        scores = imatrix_scores(blocks.model, layer, matrix, name)
        plan = keep_best(LayerStatistics(layer), scores, keep, kept_whole, decided_by=name)
        layers.append(replace(plan, figures={"kept_share": kept_share(plan, scores)}))
    source = Source(first.path.name, None, blocks.fingerprint)
    data = {"source": matrix.path.name, "sha256": file_digest(matrix.path)}
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
    expert_plan = plan.expert_plan
    others = [step.name for step in plan.steps if step.name != PRUNE]
    others += ["split"] * bool(plan.split) + ["correct"] * bool(plan.correction)
    other = next(iter(others), None)
    merged = next((layer.module for layer in expert_plan.layers if not layer.is_drop), None)
    if other is not None or merged is not None:
        what = f"has the step {other}" if other is not None else f"merges experts ({merged})"
        raise CompressionError(
            f"the plan {what}, which needs the weights as plain numbers, and a GGUF file is only "
            "cut; apply it to the checkpoint and convert the result, or plan with a strategy that "
            "only drops (--split 1 --correct none)"
        )
    if not all(step.decision for step in plan.steps) or not plan.steps:
        raise CompressionError(
            "the plan does not say which experts stay; make it by moe-compress plan"
        )
    of_file = plan.source.fingerprint.startswith(FINGERPRINT)
    if of_file and plan.source.fingerprint != blocks.fingerprint:
        raise CompressionError(
            "the plan was made for another GGUF model: the routers differ; plan again for this one"
        )
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
    if expert_plan.budget is not None or expert_plan.head_experts is not None:
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
            is_matrix = len(source.checkpoint.tensors[key].shape) == 2
            if role.is_router and role.layer == layer.name and is_matrix:
                weights.append(key)
        if len(weights) != 1:  # by which the experts are scored
            return UNCHECKED
        wanted = source.checkpoint.read(weights[0]).double().numpy()
        router = dequantised(model.tensors[name]).astype(np.float64)
        if router.shape != wanted.shape:
            raise CompressionError(
                f"{name} has the shape {list(router.shape)}, the plan's source "
                f"{list(wanted.shape)}; {MATCH}"
            )
        difference = float(np.abs(router - wanted).max() / max(np.abs(wanted).max(), 1e-30))
        if not difference <= largest:
            largest = difference
            worst = name
    return SAME if largest <= ROUNDING else DIFFERENT.format(worst, largest)
