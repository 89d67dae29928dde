"""The parts of a GGUF model: which tensors hold its experts, the rules of its routers, and its
sizes."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from compressor.checkpoint.reader import Size
from compressor.errors import CompressionError
from compressor.extras import require
from compressor.formatting import counted, joined
from compressor.frozen import frozen
from compressor.gguf_files.header import Gguf, GgufTensor, open_gguf
from compressor.model.inspection import PARTS, Part, SmallerSize, candidates
from compressor.model.moe_layer import MoeLayer, check_count

EXPERTS = re.compile(
    r"blk\.(\d{1,5})\.ffn_(?:gate|up|down|gate_up)_exps(?:\.(?:weight|bias|scale|input_scale))?"
)
ROUTER = re.compile(
    r"blk\.(\d{1,5})\.(?:ffn_gate_inp(?:\.(?:weight|bias))?"
    r"|exp_probs_b(?:_vl)?(?:\.(?:weight|bias))?)"
)
# not by expert
WHOLE = re.compile(r"blk\.\d+\.(ffn_norm_exps\.weight|ffn_gate_inp\.scale|ffn_gate_inp_shexp\.\w+)")
# speaks of experts, too
STRANGE = re.compile(r"exps|exp_probs|gate_inp|tid2eid|ffn_(gate|up|down)\.\d+\.")
DOWN = "blk.{}.ffn_down_exps.weight"
GATE = "blk.{}.ffn_gate_inp.weight"
PER_GROUP = 2  # experts that llama.cpp scores a routing group by
FINGERPRINT = "gguf:"
PLANS = "moe_compressor.plans"  # the key of the metadata with the plans that a model was made by


@frozen
class Blocks:
    """The MoE blocks of a GGUF model. A layer is called blk.N, and N is its number."""

    model: Gguf
    arch: str
    layers: tuple[MoeLayer, ...]
    # blocks that predict further tokens; llama.cpp runs them for speculative decoding alone
    heads: frozenset[int]
    block_of: Mapping[str, int]  # for each tensor with the expert as outermost dimension, its block
    fingerprint: str  # of the routers, which quantising leaves as they are

    @property
    def experts(self) -> int:
        return self.layers[0].experts

    def cut(self, tensor: GgufTensor, experts: int) -> GgufTensor:
        """Return a tensor with so many experts; one that isn't split by expert as it is."""
        return tensor.with_experts(experts) if tensor.name in self.block_of else tensor


def find_blocks(model: Gguf) -> Blocks:
    """The MoE blocks; raises `CompressionError` where there are none, or tensors that nobody knows
    how to cut."""
    first = model.first
    arch = first.text("general.architecture")
    where = first.path.name
    if first.text("general.type") not in ("", "model"):
        raise CompressionError(
            f"{where} is of the type {first.text('general.type')!r}; name the GGUF file of a model"
        )
    experts = first.number(f"{arch}.expert_count")
    block_of = dict[str, int]()
    for name in model.tensors:
        match = EXPERTS.fullmatch(name) or ROUTER.fullmatch(name)
        if match:
            block_of[name] = int(match[1])
        elif STRANGE.search(name) and not WHOLE.fullmatch(name):
            raise CompressionError(
                f"{where}: the tensor {name} belongs to experts in an unknown way; compress the "
                "checkpoint that the file was made of and convert the result"
            )
    if experts < 1 or not block_of:
        raise CompressionError(
            f"{where} ({arch or 'no architecture'}) has no routed experts; name a model that has"
        )
    numbers = sorted(set(block_of.values()))
    tensors = model.tensors
    for name in block_of:
        shape = [*tensors[name].shape]
        if shape[:1] != [experts]:
            raise CompressionError(
                f"{where}: {name} has the shape {shape}, which does not begin with the {experts} "
                "experts; convert the model with a newer llama.cpp"
            )
    for number in numbers:
        for name in (GATE.format(number), DOWN.format(number)):
            if name not in block_of:
                raise CompressionError(
                    f"{where}: blk.{number} has experts but no {name}; it is not supported"
                )
    groups = max(1, first.number(f"{arch}.expert_group_count"))
    used = first.content(f"{arch}.expert_used_count")  # hybrids have one for each block
    layers = []
    for number in numbers:
        block = f"blk.{number}"
        layer = MoeLayer(
            name=block,
            block=block,
            router=GATE.format(number),
            decoder_layer=block,
            index=number,
            experts=experts,
            top_k=used[number] if isinstance(used, tuple) else int(used or 0),
            routing_groups=groups,
            chosen_groups=max(1, first.number(f"{arch}.expert_group_used_count", groups)),
            experts_per_group=PER_GROUP if groups > 1 else 1,
        )
        check_count(layer, experts, f"{where}: {block}")
        layers.append(layer)
    last = first.number(f"{arch}.block_count")
    further = min(first.number(f"{arch}.nextn_predict_layers"), last)
    heads = frozenset(range(last - further, last)) & {*numbers}
    digest = hashlib.sha256(arch.encode())
    for number in numbers:
        digest.update(f"blk.{number}".encode() + tensors[GATE.format(number)].read())
    return Blocks(model, arch, tuple(layers), heads, block_of, FINGERPRINT + digest.hexdigest())


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
    quantization: dict[str, str]  # 'ffn_down_exps' -> 'Q6_K in 12 blocks and Q4_K in 12 blocks'
    parameters: int
    bytes: int
    parts: tuple[Part, ...]
    outcomes: tuple[SmallerSize, ...]
    pruned_before: bool  # by this tool
    module_of_layers: tuple[str, ...]


def inspect_gguf(path: str, experts: int | None = None) -> GgufInspection:
    """The report for a GGUF file, or the first of several; reads no tensor but the routers."""
    require("gguf")
    from gguf.constants import GGMLQuantizationType

    model = open_gguf(path)
    blocks = find_blocks(model)
    first = model.first
    layer = blocks.layers[0]
    tensors = model.tensors.values()
    routing = f"top-{layer.top_k} of {layer.experts}"
    if layer.routing_groups > 1:
        routing += (
            f", {layer.routing_groups} routing groups of which a token may use "
            f"{layer.chosen_groups}"
        )
    by_part: dict[str, list[GgufTensor]] = {part: [] for part in PARTS}
    kinds: dict[str, Counter[str]] = {}  # of each kind of expert weights
    for tensor in tensors:
        name = tensor.name
        part = "attention" if ".attn" in name else "other"
        if EXPERTS.fullmatch(name):
            part = "routed experts"
            if name.endswith("_exps.weight"):
                of_kind = kinds.setdefault(name.split(".")[2], Counter())
                of_kind[GGMLQuantizationType(tensor.kind).name] += 1
        elif name in blocks.block_of:
            part = "routers"
        elif name.startswith(("token_embd.", "output.")):
            part = "embeddings"
        elif "shexp" in name:
            part = "shared experts"
        by_part[part].append(tensor)
    total = Size.of(tensors)
    parts = []
    for part, inside in by_part.items():
        size = Size.of(inside)
        if size.parameters:
            parts.append(Part(part, size.parameters, size.bytes))
    quantization = {}
    for name, counts in kinds.items():
        several = [f"{kind} in {counted(count, 'block')}" for kind, count in counts.most_common()]
        quantization[name] = joined(several) if len(counts) > 1 else next(iter(counts))
    outcomes = []
    for count in candidates(blocks.layers, experts):
        size = Size.of(blocks.cut(tensor, count) for tensor in tensors)
        outcomes.append(SmallerSize(count, size.parameters, size.bytes))
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
        quantization=quantization,
        parameters=total.parameters,
        bytes=total.bytes,
        parts=tuple(parts),
        outcomes=tuple(outcomes),
        pruned_before=PLANS in first.values,
        module_of_layers=tuple(layer.name for layer in blocks.layers),
    )
