"""Advice on servers: which of them run a model at full speed, and the nearest number of experts
that suits all.

`servers.toml` has the rules: what servers did at the version and on the day that a rule names. E is
the number of routed experts in a layer, K the top-k, I the width of an expert (its neurons),
n_group the number of routing groups, and topk_group how many of them a token may use."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from compressor.formatting import joined
from compressor.frozen import frozen

IN_WORDS = {  # effects, from the worst
    "wrong": "wrong answers",
    "fails": "can fail",
    "slower": "slower",
    "larger": "larger",
}
LLAMA_CPP = "llama.cpp"
TRANSFORMERS = "transformers"
SIZES = (2, 4, 8)  # common sizes of expert or tensor parallelism
TO_512 = frozenset(2**power for power in range(10))
VLLM_KERNELS = TO_512 | {192, 320, 384, 448, 576}


@frozen
class Served:
    """The facts of a model that decide how servers run it."""

    family: str  # transformers' model type
    experts: int
    top_k: int
    width: int
    groups: int = 1
    chosen_groups: int = 1
    # the router chooses experts by scores plus a bias, but weights them without it
    selection_bias: bool = False
    tied: bool = False  # the language-model head is the embedding
    quantization: str = ""  # the config's quant_method
    block: int = 128  # rows and columns that share a scale in FP8; 0 for none
    aligned: bool = True  # each row of the experts' matrices is a multiple of 16 bytes

    @property
    def uneven(self) -> tuple[int, ...]:
        """The sizes of parallelism up to the number of experts that do not divide it."""
        return tuple(size for size in SIZES if size <= self.experts and self.experts % size)

    @property
    def cut_blocks(self) -> tuple[int, ...]:
        """The sizes of tensor parallelism whose parts of an expert are no whole blocks of FP8."""
        return tuple(size for size in SIZES if self.block and self.width % (size * self.block))


CONDITIONS: Mapping[str, Callable[[Served], bool]] = {
    # on the models that rules are about
    "all": lambda model: True,
    "K-quants and I-quants": lambda model: True,
    "Marlin kernels (4-bit weights)": lambda model: True,
    "not quantised, FlashInfer's TRT-LLM kernel": lambda model: not model.quantization,
    "not quantised, on AMD": lambda model: not model.quantization,
    "FP8 in blocks": lambda model: model.quantization == "fp8" and model.block > 0,
    "FP8 (TRT-LLM kernel)": lambda model: model.quantization == "fp8" and model.block > 0,
    "gpt_oss in MXFP4": lambda model: model.family == "gpt_oss" and model.quantization == "mxfp4",
    "routing groups": lambda model: model.groups > 1,
    "routing groups with a selection bias": lambda model: model.groups > 1 and model.selection_bias,
    "softmax or sigmoid, no routing groups": lambda model: (
        model.groups == 1 and model.family != "deepseek_v4"
    ),
    "softmax, no routing groups, on AMD": lambda model: (
        model.groups == 1 and not model.selection_bias
    ),
    "no routing groups, on CUDA": lambda model: model.groups == 1,
    # on numbers of experts
    "E is a power of two up to 512": lambda model: model.experts in TO_512,
    "E is a power of two up to 512, 288 or 576": lambda model: model.experts in TO_512 | {288, 576},
    "E is a power of two up to 512, or 192, 320, 384, 448 or 576": lambda model: (
        model.experts in VLLM_KERNELS
    ),
    "E is a power of two up to 512, or on CUDA 192, 320, 384, 448 or 576": lambda model: (
        model.experts in VLLM_KERNELS
    ),
    "E is a power of two, with at most 32 experts a group and 128 in the groups of a token": (
        lambda model: (
            model.experts & (model.experts - 1) == 0
            and model.experts <= 32 * model.groups
            and model.experts * model.chosen_groups <= 128 * model.groups
        )
    ),
    "E is a multiple of n_group and at least two experts a group": lambda model: (
        model.experts % model.groups == 0 and model.experts >= 2 * model.groups
    ),
    "E is a multiple of the size of expert parallelism": lambda model: not model.uneven,
    "E is a multiple of 4, at most 512 and above K": lambda model: (
        model.experts % 4 == 0 and model.top_k < model.experts <= 512
    ),
    "E is at least the size of tensor parallelism": lambda model: model.experts >= max(SIZES),
    "E is at most 1,024 (512 in versions before)": lambda model: model.experts <= 1024,
    # on the top-k
    "K is at most 8": lambda model: model.top_k <= 8,
    "K and n_group are at most 32": lambda model: model.top_k <= 32 and model.groups <= 32,
    "K is at most 32; with routing groups at most 8, or 22 where E is above 384": lambda model: (
        model.top_k <= (32 if model.groups == 1 else 8 if model.experts <= 384 else 22)
    ),
    # on the width and the head
    "I is a multiple of 64": lambda model: model.width % 64 == 0,
    "I is a multiple of 128": lambda model: model.width % 128 == 0,
    "I is a multiple of 256": lambda model: model.width % 256 == 0,
    "I is a multiple of the block": lambda model: model.width % model.block == 0,
    "I is a multiple of the block on each of 2, 4 and 8 GPUs": lambda model: not model.cut_blocks,
    "I and the hidden size in bytes are multiples of 16": lambda model: model.aligned,
    "the head is not tied to the embeddings": lambda model: not model.tied,
}


@frozen
class Rule:
    """A server's requirement of some models, and how the server treats a model that does not meet
    it; the fields are explained in `servers.toml`."""

    server: str
    version: str
    date: str
    source: str
    effect: str
    about: str
    needs: str  # a name in CONDITIONS
    says: str
    whom: str = "all"  # a name in CONDITIONS
    families: Sequence[str] = ()  # all if none is named
    evidence: str = "read"

    def is_broken_by(self, model: Served) -> bool:
        """Return True for a model that the rule is about and that does not meet it."""
        is_family = not self.families or model.family in self.families
        concerned = is_family and CONDITIONS[self.whom](model)
        return concerned and not CONDITIONS[self.needs](model)


RULES = tuple(
    Rule(**rule)
    for rule in tomllib.loads(Path(__file__).with_name("servers.toml").read_text())["rules"]
)
SERVERS = tuple(dict.fromkeys(rule.server for rule in RULES if rule.server != TRANSFORMERS))


@frozen
class Breach:
    """A rule that a model breaks."""

    server: str
    effect: str
    says: str
    needs: str
    version: str
    source: str


@frozen
class Advice:
    """Advice on a number of experts.

    `nearest` is the nearest number that meets all rules on numbers of experts, maybe this one; None
    if there is none."""

    experts: int
    top_k: int
    width: int
    full_speed: tuple[str, ...]
    breaches: tuple[Breach, ...]
    nearest: int | None


def breach_text(rule: Rule, model: Served) -> str:
    """Return the sentence on how the server treats a model that breaks the rule."""
    words = asdict(model)
    for name, sizes, possible, others in (
        ("uneven", model.uneven, "even", [size for size in SIZES if model.experts % size == 0]),
        ("cut_blocks", model.cut_blocks, "whole_blocks", {*SIZES} - {*model.cut_blocks}),
    ):
        words[name] = joined([str(size) for size in sizes])
        dividing = joined([str(size) for size in sorted(others)])
        words[possible] = f" (over {dividing} it can)" if dividing else ""
    return rule.says.format(**words)


def broken(model: Served) -> tuple[Rule, ...]:
    """Return the rules that a model breaks."""
    return tuple(rule for rule in RULES if rule.is_broken_by(model))


def advise(model: Served, counts: Iterable[int] = ()) -> Advice:
    """Return how servers run a model; `counts` are other numbers of experts that it could have."""
    breaches = tuple(
        Breach(
            rule.server,
            rule.effect,
            breach_text(rule, model),
            rule.needs,
            rule.version,
            rule.source,
        )
        for rule in broken(model)
    )
    servers = {breach.server for breach in breaches}
    full_speed = tuple(server for server in SERVERS if server not in servers)

    by_distance = sorted(
        {model.experts, *counts}, key=lambda count: (abs(count - model.experts), -count)
    )
    nearest = None
    for count in by_distance:
        if all(rule.about != "experts" for rule in broken(replace(model, experts=count))):
            nearest = count
            break
    return Advice(model.experts, model.top_k, model.width, full_speed, breaches, nearest)


def servers_in_words(advice: Advice) -> str:
    """Return the servers that run a model at full speed, and the others by their worst effect, on
    one line."""
    full = ", ".join(advice.full_speed)
    parts = [f"at full speed in {full}" if full else "in no server at full speed"]
    known = set[str]()
    for effect, words in IN_WORDS.items():
        breached = dict.fromkeys(
            breach.server for breach in advice.breaches if breach.effect == effect
        )
        worst = [server for server in breached if server not in known and server in SERVERS]
        known |= breached.keys()
        if worst:
            parts.append(f"{words} in {', '.join(worst)}")
    for breach in advice.breaches:
        if breach.server == TRANSFORMERS:
            parts.append(f"{TRANSFORMERS} {breach.says}")
    near = ""
    if advice.nearest not in (None, advice.experts):
        near = f"nearest number for all: {advice.nearest}; "
    return "; ".join(parts) + (f" ({near}see moe-compress inspect)" if known else "")
