"""Advice on servers: which of them run a model at full speed, and the nearest number of experts
that suits all.

`RULES` is what servers did at the version and on the day that a rule names. E is the number of
routed experts in a layer, K the top-k, I the width of an expert (its neurons), n_group the number
of routing groups, and topk_group how many of them a token may use."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

from compressor.formatting import joined

Effect = Literal["fails", "wrong", "slower", "larger"]
IN_WORDS: Mapping[Effect, str] = {  # from the worst
    "wrong": "wrong answers",
    "fails": "can fail",
    "slower": "slower",
    "larger": "larger",
}
About = Literal["experts", "top-k", "width", "head"]
Evidence = Literal["read", "run", "reported"]  # in the source, seen in a run, or reported by others

LLAMA_CPP = "llama.cpp"
TRANSFORMERS = "transformers"
# server, version, and the day on which its source was read
VLLM = ("vLLM", "0.32.0", "2026-11-22")
SGLANG = ("SGLang", "0.5.23", "2026-11-22")
FLASHINFER = ("FlashInfer", "0.6.18 (fb28d7242)", "2026-11-22")
LLAMA = (LLAMA_CPP, "0c1e57098", "2026-11-22")
SIZES = (2, 4, 8)  # common sizes of expert or tensor parallelism
TO_512 = frozenset(2**power for power in range(10))
VLLM_KERNELS = TO_512 | {192, 320, 384, 448, 576}


@dataclass(frozen=True, slots=True)
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


class Condition(NamedTuple):
    """A condition on a model, in words and as code."""

    words: str
    holds: Callable[[Served], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """A server's requirement of some models, and how the server treats a model that does not meet
    it."""

    server: str
    version: str
    date: str  # on which the source was read
    source: str  # a path in the server's repository, or an issue
    effect: Effect
    about: About
    whom: Condition
    needs: Condition
    # continues the server's name; may contain {experts}, {width}, {even} and others of
    # `breach_text`
    says: str
    evidence: Evidence = "read"


def families(names: str) -> Condition:
    return Condition(names, lambda model: model.family in names.split(", "))


def width_multiple(of: int) -> Condition:
    return Condition(f"I is a multiple of {of}", lambda model: model.width % of == 0)


# conditions of several rules
ALL = Condition("all", lambda model: True)
GROUPS = Condition("routing groups", lambda model: model.groups > 1)
WHOLE_GROUPS = Condition(
    "E is a multiple of n_group and above it",
    lambda model: model.experts % model.groups == 0 and model.experts >= 2 * model.groups,
)
BIASED_GROUPS = Condition(
    "routing groups with a selection bias", lambda model: model.groups > 1 and model.selection_bias
)
FP8_BLOCKS = Condition(
    "FP8 in blocks", lambda model: model.quantization == "fp8" and model.block > 0
)
FP8_KERNEL = FP8_BLOCKS._replace(words="FP8 (TRT-LLM kernel)")
TENSOR_PARALLEL = families(
    "cohere2_moe, exaone_moe, laguna, lfm2_moe, minimax_m2, qwen2_moe, qwen3_moe"
)
DIVISIBLE = Condition(
    "E is a multiple of the size of expert parallelism", lambda model: not model.uneven
)
SPREAD = Condition(
    "E is at least the size of tensor parallelism", lambda model: model.experts >= max(SIZES)
)
WHOLE_BLOCKS = Condition(
    "I is a multiple of the block on each of 2, 4 and 8 GPUs", lambda model: not model.cut_blocks
)
UNTIED = Condition("the head is not tied to the embeddings", lambda model: not model.tied)
CUT_BLOCKS = (
    "cuts FP8 blocks of {block} with tensor parallelism over {cut_blocks} GPUs{whole_blocks}"
)

RULES = (
    Rule(
        TRANSFORMERS,
        "5.23",
        "2026-11-29",
        "integrations/moe.py (grouped_mm)",
        "fails",
        "width",
        ALL,
        Condition(
            "I and the hidden size in bytes are multiples of 16", lambda model: model.aligned
        ),
        'runs experts of {width} neurons only with experts_implementation="eager", as their rows '
        "do not fill 16 bytes",
        "run",
    ),
    Rule(
        *VLLM,
        "vllm/model_executor/layers/fused_moe/router/grouped_topk_router.py",
        "wrong",
        "experts",
        GROUPS,
        WHOLE_GROUPS._replace(words="E is a multiple of n_group and at least two experts a group"),
        "chooses among {experts} experts without their routing groups, in silence",
    ),
    Rule(
        "vLLM",
        "085c812b2",
        "2026-11-22",
        "csrc/libtorch_stable/moe/topk_softmax_kernels.cu",
        "slower",
        "experts",
        Condition(
            "softmax or sigmoid, no routing groups",
            lambda model: model.groups == 1 and model.family != "deepseek_v4",
        ),
        Condition(
            "E is a power of two up to 512, or on CUDA 192, 320, 384, 448 or 576",
            lambda model: model.experts in VLLM_KERNELS,
        ),
        "routes among {experts} experts by a slower kernel",
    ),
    Rule(
        "vLLM",
        "0d8909899",
        "2026-11-22",
        "csrc/libtorch_stable/moe/topk_softplus_sqrt_kernels.cu; issue 51521, PR 50982 (open)",
        "fails",
        "experts",
        families("deepseek_v4"),
        Condition(
            "E is a power of two up to 512, or 192, 320, 384, 448 or 576",
            lambda model: model.experts in VLLM_KERNELS,
        ),
        "has no router kernel for {experts} experts of DeepSeek-V4 and ends with an error",
    ),
    Rule(
        *VLLM,
        "vllm/model_executor/models/gpt_oss.py",
        "wrong",
        "experts",
        Condition(
            "gpt_oss in MXFP4",
            lambda model: model.family == "gpt_oss" and model.quantization == "mxfp4",
        ),
        DIVISIBLE,
        "leaves the last of {experts} experts out with expert parallelism over {uneven} GPUs{even}",
    ),
    Rule(
        *VLLM,
        "vllm/model_executor/models/qwen3_moe.py and others",
        "fails",
        "experts",
        TENSOR_PARALLEL,
        SPREAD,
        "takes no tensor parallelism over more GPUs than the {experts} experts",
    ),
    Rule(
        *VLLM,
        "vllm/model_executor/layers/fused_moe/oracle/unquantized.py",
        "slower",
        "width",
        Condition(
            "not quantised, FlashInfer's TRT-LLM kernel", lambda model: not model.quantization
        ),
        width_multiple(128),
        "pads experts of {width} neurons to a multiple of 128",
    ),
    Rule(
        *VLLM,
        "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
        "fails",
        "width",
        FP8_BLOCKS,
        Condition("I is a multiple of the block", lambda model: model.width % model.block == 0),
        "refuses experts of {width} neurons in FP8 blocks of {block}",
    ),
    Rule(
        "vLLM",
        "0.32.0",
        "2026-11-29",
        "vllm/model_executor/layers/quantization/utils/fp8_utils.py (validate_fp8_block_shape)",
        "fails",
        "width",
        FP8_BLOCKS,
        WHOLE_BLOCKS,
        CUT_BLOCKS,
    ),
    Rule(
        *VLLM,
        "vllm/model_executor/layers/quantization/utils/marlin_utils.py",
        "slower",
        "width",
        Condition("Marlin kernels (4-bit weights)", lambda model: True),
        width_multiple(64),
        "pads experts of {width} neurons to a multiple of 64 once they are quantised for Marlin",
    ),
    Rule(
        *VLLM,
        "vllm/model_executor/layers/fused_moe/router/grouped_topk_router.py",
        "slower",
        "top-k",
        BIASED_GROUPS,
        Condition(
            "K and n_group are at most 32", lambda model: model.top_k <= 32 and model.groups <= 32
        ),
        "routes a grouped top-{top_k} by slower code",
    ),
    Rule(
        *VLLM,
        "vllm/model_executor/models/olmoe.py and others",
        "wrong",
        "head",
        families(
            "afmoe, deepseek_v2, deepseek_v3, glm4_moe, gpt_oss, jamba, minimax_m2, nemotron_h, "
            "olmoe, qwen3_next"
        ),
        UNTIED,
        "does not know that the head is tied to the embeddings and answers uniformly, in silence",
        "run",
    ),
    Rule(
        *SGLANG,
        "python/sglang/srt/layers/moe/fused_moe_triton/layer.py",
        "fails",
        "experts",
        ALL,
        DIVISIBLE,
        "cannot spread {experts} experts over {uneven} GPUs with expert parallelism{even}",
    ),
    Rule(
        "SGLang",
        "0.5.23",
        "2026-11-29",
        "python/sglang/srt/layers/quantization/fp8.py",
        "fails",
        "width",
        FP8_BLOCKS,
        WHOLE_BLOCKS,
        CUT_BLOCKS,
        "reported",
    ),
    Rule(
        *SGLANG,
        "python/sglang/srt/models/qwen3_moe.py and others",
        "fails",
        "experts",
        TENSOR_PARALLEL,
        SPREAD,
        "takes no tensor parallelism over more GPUs than the {experts} experts",
    ),
    Rule(
        *SGLANG,
        "python/sglang/srt/layers/moe/topk.py",
        "slower",
        "experts",
        BIASED_GROUPS,
        Condition(
            "E is a power of two, with at most 32 experts a group and 128 in the groups of a token",
            lambda model: (
                model.experts & (model.experts - 1) == 0
                and model.experts <= 32 * model.groups
                and model.experts * model.chosen_groups <= 128 * model.groups
            ),
        ),
        "does not use FlashInfer's router kernel for {experts} experts, but its own",
    ),
    Rule(
        *SGLANG,
        "python/sglang/srt/layers/moe/topk.py",
        "slower",
        "top-k",
        BIASED_GROUPS,
        Condition("K is at most 8", lambda model: model.top_k <= 8),
        "does not use FlashInfer's router kernel for a top-{top_k}, but its own",
    ),
    Rule(
        *SGLANG,
        "python/sglang/srt/layers/quantization/unquant.py",
        "slower",
        "width",
        Condition("not quantised, on AMD", lambda model: not model.quantization),
        width_multiple(128),
        "does not use aiter's kernels for experts of {width} neurons on AMD",
    ),
    Rule(
        *FLASHINFER,
        "csrc/trtllm_fused_moe_kernel_launcher.cu; vLLM's fused_moe/experts/trtllm_fp8_moe.py",
        "fails",
        "experts",
        FP8_KERNEL,
        Condition(
            "E is a multiple of 4, at most 512 and above K",
            lambda model: model.experts % 4 == 0 and model.top_k < model.experts <= 512,
        ),
        "takes no {experts} experts in its FP8 kernel",
    ),
    Rule(
        *FLASHINFER,
        "csrc/trtllm_fused_moe_kernel_launcher.cu",
        "fails",
        "top-k",
        FP8_KERNEL,
        Condition(
            "K is at most 32; with routing groups at most 8, or 22 where E is above 384",
            lambda model: (
                model.top_k <= (32 if model.groups == 1 else 8 if model.experts <= 384 else 22)
            ),
        ),
        "takes no top-{top_k} of {experts} experts in its FP8 kernel",
    ),
    Rule(
        "aiter",
        "0.1.20 (e4048607a)",
        "2026-11-22",
        "csrc/kernels/topk_softmax_kernels.cu",
        "slower",
        "experts",
        Condition(
            "softmax, no routing groups, on AMD",
            lambda model: model.groups == 1 and not model.selection_bias,
        ),
        Condition("E is a power of two up to 512", lambda model: model.experts in TO_512),
        "routes among {experts} experts by a slower kernel",
    ),
    Rule(
        *LLAMA,
        "src/llama-hparams.h (LLAMA_MAX_EXPERTS), src/llama-model.cpp",
        "fails",
        "experts",
        ALL,
        Condition(
            "E is at most 1,024 (512 in versions before)", lambda model: model.experts <= 1024
        ),
        "loads no more than 1,024 experts a layer",
    ),
    Rule(
        *LLAMA,
        "src/llama-model.cpp",
        "fails",
        "experts",
        GROUPS,
        WHOLE_GROUPS,
        "refuses {experts} experts in this many routing groups",
    ),
    Rule(
        *LLAMA,
        "ggml/src/ggml-cuda/topk-moe.cu",
        "slower",
        "experts",
        Condition("no routing groups, on CUDA", lambda model: model.groups == 1),
        Condition(
            "E is a power of two up to 512, 288 or 576",
            lambda model: model.experts in TO_512 | {288, 576},
        ),
        "routes among {experts} experts by slower kernels on CUDA",
    ),
    Rule(
        *LLAMA,
        "src/llama-quant.cpp (tensor_type_fallback)",
        "larger",
        "width",
        Condition("K-quants and I-quants", lambda model: True),
        width_multiple(256),
        "quantises down projections of {width} columns to its 32-blocks or f16 instead of K-quants",
    ),
    Rule(
        *LLAMA,
        "src/models/olmoe.cpp and others",
        "fails",
        "head",
        families(
            "deepseek_v4, dots1, exaone_moe, gpt_oss, kimi_linear, mellum, minimax_m2, olmoe, "
            "phimoe, qwen2_moe"
        ),
        UNTIED,
        "wants a head of its own, where this model ties it to the embeddings",
        "run",
    ),
)
SERVERS = tuple(dict.fromkeys(rule.server for rule in RULES if rule.server != TRANSFORMERS))


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule that a model breaks."""

    server: str
    effect: Effect
    says: str
    needs: str
    version: str
    source: str


@dataclass(frozen=True, slots=True)
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
    return tuple(rule for rule in RULES if rule.whom.holds(model) and not rule.needs.holds(model))


def advise(model: Served, counts: Iterable[int] = ()) -> Advice:
    """Return how servers run a model; `counts` are other numbers of experts that it could have."""
    breaches = tuple(
        Breach(
            rule.server,
            rule.effect,
            breach_text(rule, model),
            rule.needs.words,
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
