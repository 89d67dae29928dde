"""What a GGUF model is made of, and what fewer experts would leave, from its header alone."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from compressor.gguf_files.blocks import EXPERTS, Blocks, cut, find_blocks
from compressor.gguf_files.header import Tensor, type_name
from compressor.gguf_files.parts import Gguf, open_gguf
from compressor.gguf_files.writing import PLANS
from compressor.model.inspection import PARTS, Outcome, Part, candidates
from compressor.words import counted, joined


@dataclass(frozen=True, slots=True)
class GgufInspection:
    """The report of `inspect` on a GGUF model."""

    model: str
    name: str  # as the metadata has it
    files: int
    architecture: str
    moe_layers: int
    layers: int
    experts: int
    top_k: int
    routing: str
    shared_experts: int  # that the metadata counts
    heads: tuple[int, ...]  # blocks that predict further tokens and have experts
    quantization: dict[str, str]  # of each kind of expert tensor
    parameters: int
    bytes: int
    parts: tuple[Part, ...]
    outcomes: tuple[Outcome, ...]
    pruned_before: bool  # by this tool
    module_of_layers: tuple[str, ...]


def inspect_gguf(path: str, experts: int | None = None) -> GgufInspection:
    """The report for a GGUF file, or the first of several; reads no tensor but the routers."""
    model = open_gguf(path)
    blocks = find_blocks(model)
    first, layer, tensors = model.first, blocks.layers[0], model.tensors.values()
    routing = f"top-{layer.top_k} of {layer.experts}"
    if layer.routing_groups > 1:
        routing += f", {layer.routing_groups} routing groups of which a token may use {layer.chosen_groups}"
    totals = {part: [0, 0] for part in PARTS}
    for tensor in tensors:
        entry = totals[_part_of(tensor.name, blocks)]
        entry[0], entry[1] = entry[0] + tensor.parameters, entry[1] + tensor.nbytes
    counts = candidates(blocks.layers, experts)
    return GgufInspection(
        model=path,
        name=first.text("general.name"),
        files=len(model.parts),
        architecture=blocks.arch,
        moe_layers=len(blocks.layers),
        layers=first.number(f"{blocks.arch}.block_count"),
        experts=blocks.experts,
        top_k=layer.top_k,
        routing=routing,
        shared_experts=first.number(f"{blocks.arch}.expert_shared_count"),
        heads=tuple(sorted(blocks.heads)),
        quantization=_quantization(tensors, blocks),
        parameters=sum(tensor.parameters for tensor in tensors),
        bytes=sum(tensor.nbytes for tensor in tensors),
        parts=tuple(Part(name, *totals[name]) for name in PARTS if totals[name][0]),
        outcomes=tuple(left(model, blocks, count) for count in counts),
        pruned_before=PLANS in first.values,
        module_of_layers=tuple(layer.name for layer in blocks.layers),
    )


def left(model: Gguf, blocks: Blocks, experts: int) -> Outcome:
    """Parameters and bytes of the tensors when every block keeps so many experts."""
    tensors = [cut(tensor, blocks, experts) for tensor in model.tensors.values()]
    return Outcome(experts, sum(each.parameters for each in tensors), sum(each.nbytes for each in tensors))


def _quantization(tensors: Iterable[Tensor], blocks: Blocks) -> dict[str, str]:
    """'ffn_down_exps' -> 'Q6_K in 12 blocks and Q4_K in 12 blocks'; of weights alone."""
    found: dict[str, Counter[str]] = {}
    for tensor in tensors:
        if EXPERTS.fullmatch(tensor.name) and tensor.name.endswith("_exps.weight"):
            found.setdefault(tensor.name.split(".")[2], Counter())[type_name(tensor.kind)] += 1
    return {
        name: next(iter(kinds))
        if len(kinds) == 1
        else joined([f"{kind} in {counted(number, 'block')}" for kind, number in kinds.most_common()])
        for name, kinds in found.items()
    }


def _part_of(name: str, blocks: Blocks) -> str:
    if name in blocks.homes:
        return "routed experts" if EXPERTS.fullmatch(name) else "routers"
    if name.startswith(("token_embd.", "output.")):
        return "embeddings"
    if "shexp" in name:
        return "shared experts"
    return "attention" if ".attn" in name else "other"
