"""What a GGUF model says of its experts: which tensors hold them, and the rules of its routers."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from compressor.errors import CompressionError
from compressor.gguf_files.header import Tensor
from compressor.gguf_files.parts import Gguf
from compressor.model.architecture import MoeLayer, check_count
from compressor.recipe.steps_plan import MOST_EXPERTS, MOST_IN_ALL, MOST_LAYERS
from compressor.words import counted

EXPERTS = re.compile(r"blk\.(\d{1,5})\.ffn_(?:gate|up|down|gate_up)_exps(?:\.(?:weight|bias|scale|input_scale))?")
ROUTER = re.compile(r"blk\.(\d{1,5})\.(?:ffn_gate_inp(?:\.(?:weight|bias))?|exp_probs_b(?:_vl)?(?:\.(?:weight|bias))?)")
WHOLE = re.compile(r"blk\.\d+\.(ffn_norm_exps\.weight|ffn_gate_inp\.scale|ffn_gate_inp_shexp\.\w+)")  # not by expert
STRANGE = re.compile(r"exps|exp_probs|gate_inp|tid2eid|ffn_(gate|up|down)\.\d+\.")  # speaks of experts, too
DOWN, GATE = "blk.{}.ffn_down_exps.weight", "blk.{}.ffn_gate_inp.weight"
PER_GROUP = 2  # experts that llama.cpp scores a routing group by
FINGERPRINT = "gguf:"


@dataclass(frozen=True, slots=True)
class Blocks:
    """The MoE blocks of a GGUF model. A layer is called blk.N, and N is its number."""

    arch: str
    layers: tuple[MoeLayer, ...]
    heads: frozenset[int]  # blocks that predict further tokens; llama.cpp runs them for speculative decoding alone
    homes: Mapping[str, int]  # for each tensor with the expert as outermost dimension, its block
    hidden: int
    fingerprint: str  # of the routers, which quantising leaves as they are

    @property
    def experts(self) -> int:
        """Experts of each block."""
        return self.layers[0].experts

    @property
    def count_key(self) -> str:
        """The key of the metadata that tells the number of experts."""
        return f"{self.arch}.expert_count"


def find_blocks(model: Gguf) -> Blocks:
    """The MoE blocks; raises `CompressionError` where there are none, or tensors that nobody knows how to cut."""
    first = model.first
    arch, where = first.text("general.architecture"), first.path.name
    if first.text("general.type") not in ("", "model"):
        raise CompressionError(f"{where} is of the type {first.text('general.type')!r}; name the GGUF file of a model")
    experts = first.number(f"{arch}.expert_count")
    homes = _homes(model, where)
    if experts < 1 or not homes:
        raise CompressionError(f"{where} ({arch or 'no architecture'}) has no routed experts; name a model that has")
    numbers = sorted(set(homes.values()))
    if experts > MOST_EXPERTS or len(numbers) > MOST_LAYERS or experts * len(numbers) > MOST_IN_ALL:
        raise CompressionError(f"{where}: {len(numbers):,} layers of {experts:,} experts are more than any model has")
    tensors = model.tensors
    for name in homes:
        if tensors[name].shape[:1] != (experts,):
            raise CompressionError(
                f"{where}: {name} has the shape {list(tensors[name].shape)}, so its outermost dimension is not the "
                f"{experts} experts of {arch}.expert_count; convert the model with a newer llama.cpp"
            )
    for number in numbers:
        if missing := [name for form in (GATE, DOWN) if (name := form.format(number)) not in homes]:
            raise CompressionError(f"{where}: blk.{number} has experts but no {missing[0]}; it is not supported")
    layers = tuple(_layer(model, arch, number) for number in numbers)
    last = first.number(f"{arch}.block_count")
    heads = frozenset(range(last - min(first.number(f"{arch}.nextn_predict_layers"), last), last)) & {*numbers}
    hidden = tensors[GATE.format(numbers[0])].shape[-1]
    return Blocks(arch, layers, frozenset(heads), homes, hidden, _fingerprint(model, arch, numbers))


def _homes(model: Gguf, where: str) -> dict[str, int]:
    """Each tensor that is cut, with its block."""
    homes = dict[str, int]()
    for name in model.tensors:
        if found := EXPERTS.fullmatch(name) or ROUTER.fullmatch(name):
            homes[name] = int(found[1])
        elif STRANGE.search(name) and not WHOLE.fullmatch(name):
            raise CompressionError(
                f"{where}: the tensor {name} speaks of experts in a way that is not known, so it is not cut; compress "
                "the checkpoint that the file was made of and convert the result"
            )
    return homes


def _layer(model: Gguf, arch: str, number: int) -> MoeLayer:
    """One block with the rules of its router."""
    first, name = model.first, f"blk.{number}"
    groups = max(1, first.number(f"{arch}.expert_group_count"))
    key = f"{arch}.expert_used_count"
    by_layer = first.values[key].numbers() if key in first.values else None  # hybrids have one for each block
    if by_layer is not None and number >= len(by_layer):
        raise CompressionError(f"{first.path.name}: {key} tells of {counted(len(by_layer), 'block')}, not of {name}")
    layer = MoeLayer(
        name=name,
        block=name,
        router=GATE.format(number),
        unit=name,
        index=number,
        experts=first.number(f"{arch}.expert_count"),
        top_k=first.number(key) if by_layer is None else by_layer[number],
        routing_groups=groups,
        chosen_groups=max(1, first.number(f"{arch}.expert_group_used_count", groups)),
        experts_per_group=PER_GROUP if groups > 1 else 1,
    )
    check_count(layer, layer.experts, f"{first.path.name}: {name}")
    return layer


def _fingerprint(model: Gguf, arch: str, numbers: list[int]) -> str:
    """SHA-256 over the routers' weights: no quantisation of llama.cpp changes them."""
    digest = hashlib.sha256(arch.encode())
    for number in numbers:
        digest.update(f"blk.{number}".encode())
        digest.update(model.read(GATE.format(number)))
    return FINGERPRINT + digest.hexdigest()


def cut(tensor: Tensor, blocks: Blocks, count: int) -> Tensor:
    """A tensor when so many experts stay."""
    return tensor.with_experts(count) if tensor.name in blocks.homes else tensor
