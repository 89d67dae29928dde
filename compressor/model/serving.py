"""Which servers run a model at full speed and which do not, and the nearest number of experts that all of them do.

Every rule stands with the place in the server's source it is from.
E is the number of routed experts in a layer, K the top-k, I the width of an expert (its neurons), n_group and
topk_group the routing groups and how many of them a token may use.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from compressor.formatting import joined

Effect = Literal["fails", "wrong", "slower", "larger"]
About = Literal["experts", "top-k", "width", "head"]
Evidence = Literal["read", "run", "reported"]  # in the source, in the source and seen, said by others alone

SIZES = (2, 4, 8)  # of expert or tensor parallelism, that people use
TO_512 = frozenset(2**power for power in range(10))
MULTIPLES = frozenset({192, 320, 384, 448, 576})  # of 64, for which vLLM has router kernels too
LLAMA_CUDA = TO_512 | {288, 576}
VLLM = "0.32.0"
SGLANG = "0.5.23"
LLAMA = "0c1e57098"
FLASHINFER = "0.6.18 (fb28d7242)"
AITER = "0.1.20 (e4048607a)"


@dataclass(frozen=True, slots=True)
class Served:
    """What of a model decides how servers take it."""

    family: str  # transformers' model type
    experts: int
    top_k: int
    width: int
    groups: int = 1
    chosen_groups: int = 1
    selection_bias: bool = False  # whether the router chooses by scores with a bias that weights do not have
    tied: bool = False  # the head to the embeddings
    quantization: str = ""  # quant_method of the config

    @property
    def uneven(self) -> tuple[int, ...]:
        """Sizes of parallelism, up to the number of experts, that do not divide it."""
        return tuple(size for size in SIZES if size <= self.experts and self.experts % size)


class Condition(NamedTuple):
    """One on a model, in words and as code."""

    words: str
    holds: Callable[[Served], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: whom it concerns, what it needs, and what the server does otherwise."""

    server: str
    version: str
    source: str  # a path in the server's repository, or an issue
    effect: Effect
    about: About
    says: str  # after the server's name, with {experts}, {top_k}, {width}, {uneven}, {even}
    whom: Condition
    needs: Condition
    evidence: Evidence = "read"


def said(rule: Rule, model: Served) -> str:
    """What the server does with a model that does not keep the rule."""
    dividing = joined([str(size) for size in SIZES if model.experts % size == 0])
    even = f" (over {dividing} it can)" if dividing else ""
    return rule.says.format(**asdict(model), uneven=joined([str(size) for size in model.uneven]), even=even)


def _even_groups(model: Served) -> bool:
    return model.experts % model.groups == 0 and model.experts // model.groups >= 2


def _families(names: str) -> Condition:
    return Condition(names, lambda model: model.family in names.split(", "))


def _width_multiple(of: int) -> Condition:
    return Condition(f"I is a multiple of {of}", lambda model: model.width % of == 0)


ALL = Condition("all", lambda model: True)
GROUPED = Condition("routing groups", lambda model: model.groups > 1)
BIASED_GROUPS = Condition(
    "routing groups with a selection bias", lambda model: model.groups > 1 and model.selection_bias
)
UNTIED = Condition("the head is not tied to the embeddings", lambda model: not model.tied)
DIVISIBLE = Condition("E is a multiple of the size of expert parallelism", lambda model: not model.uneven)
FP8_KERNEL = Condition("FP8 (TRT-LLM kernel)", lambda model: model.quantization == "fp8")

VLLM_TIES = _families(
    "afmoe, deepseek_v2, deepseek_v3, glm4_moe, gpt_oss, jamba, minimax_m2, nemotron_h, olmoe, qwen3_next"
)
LLAMA_HEADS = _families(
    "deepseek_v4, dots1, exaone_moe, gpt_oss, kimi_linear, mellum, minimax_m2, olmoe, phimoe, qwen2_moe"
)
TENSOR_PARALLEL = _families("cohere2_moe, exaone_moe, laguna, lfm2_moe, minimax_m2, qwen2_moe, qwen3_moe")

_vllm, _sglang = partial(Rule, "vLLM", VLLM), partial(Rule, "SGLang", SGLANG)
_flashinfer, _llama = partial(Rule, "FlashInfer", FLASHINFER), partial(Rule, "llama.cpp", LLAMA)


def _tensor_parallel(server: Callable[..., Rule], source: str) -> Rule:
    return server(
        source,
        "fails",
        "experts",
        "takes no tensor parallelism over more GPUs than the {experts} experts",
        TENSOR_PARALLEL,
        Condition("E is at least the size of tensor parallelism", lambda model: model.experts >= max(SIZES)),
    )


RULES = (
    _vllm(
        "vllm/model_executor/layers/fused_moe/router/grouped_topk_router.py",
        "wrong",
        "experts",
        "chooses among {experts} experts without their routing groups, in silence",
        GROUPED,
        Condition("E is a multiple of n_group and at least two experts a group", _even_groups),
    ),
    Rule(
        "vLLM",
        "085c812b2",
        "csrc/libtorch_stable/moe/topk_softmax_kernels.cu",
        "slower",
        "experts",
        "routes among {experts} experts by a slower kernel",
        Condition(
            "softmax or sigmoid, no routing groups", lambda model: model.groups == 1 and model.family != "deepseek_v4"
        ),
        Condition(
            "E is a power of two up to 512, or on CUDA 192, 320, 384, 448 or 576",
            lambda model: model.experts in TO_512 | MULTIPLES,
        ),
    ),
    Rule(
        "vLLM",
        "0d8909899",
        "csrc/libtorch_stable/moe/topk_softplus_sqrt_kernels.cu; issue 51521, PR 50982 (open)",
        "fails",
        "experts",
        "has no router kernel for {experts} experts of DeepSeek-V4 and ends with an error",
        _families("deepseek_v4"),
        Condition(
            "E is a power of two up to 512, or 192, 320, 384, 448 or 576",
            lambda model: model.experts in TO_512 | MULTIPLES,
        ),
    ),
    _vllm(
        "vllm/model_executor/models/gpt_oss.py",
        "wrong",
        "experts",
        "leaves the last of {experts} experts out with expert parallelism over {uneven} GPUs{even}",
        Condition("gpt_oss in MXFP4", lambda model: model.family == "gpt_oss" and model.quantization == "mxfp4"),
        DIVISIBLE,
    ),
    _tensor_parallel(_vllm, "vllm/model_executor/models/qwen3_moe.py and others"),
    _vllm(
        "vllm/model_executor/layers/fused_moe/oracle/unquantized.py",
        "slower",
        "width",
        "pads experts of {width} neurons to a multiple of 128",
        Condition("not quantised, FlashInfer's TRT-LLM kernel", lambda model: not model.quantization),
        _width_multiple(128),
    ),
    _vllm(
        "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
        "fails",
        "width",
        "refuses experts of {width} neurons in FP8 blocks of 128",
        Condition("FP8 in blocks of 128", lambda model: model.quantization == "fp8"),
        _width_multiple(128),
    ),
    _vllm(
        "vllm/model_executor/layers/quantization/utils/marlin_utils.py",
        "slower",
        "width",
        "pads experts of {width} neurons to a multiple of 64 once they are quantised for Marlin",
        Condition("Marlin kernels (4-bit weights)", lambda model: True),
        _width_multiple(64),
    ),
    _vllm(
        "vllm/model_executor/layers/fused_moe/router/grouped_topk_router.py",
        "slower",
        "top-k",
        "routes a grouped top-{top_k} by slower code",
        BIASED_GROUPS,
        Condition("K and n_group are at most 32", lambda model: model.top_k <= 32 and model.groups <= 32),
    ),
    _vllm(
        "vllm/model_executor/models/olmoe.py and others",
        "wrong",
        "head",
        "does not know that the head is tied to the embeddings and answers uniformly, in silence",
        VLLM_TIES,
        UNTIED,
        "run",
    ),
    _sglang(
        "python/sglang/srt/layers/moe/fused_moe_triton/layer.py",
        "fails",
        "experts",
        "cannot spread {experts} experts over {uneven} GPUs with expert parallelism{even}",
        ALL,
        DIVISIBLE,
    ),
    _tensor_parallel(_sglang, "python/sglang/srt/models/qwen3_moe.py and others"),
    _sglang(
        "python/sglang/srt/layers/moe/topk.py",
        "slower",
        "experts",
        "does not use FlashInfer's router kernel for {experts} experts, but its own",
        BIASED_GROUPS,
        Condition(
            "E is a power of two, with at most 32 experts a group and 128 in the groups of a token",
            lambda model: (
                model.experts & (model.experts - 1) == 0
                and model.experts <= 32 * model.groups
                and model.experts * model.chosen_groups <= 128 * model.groups
            ),
        ),
    ),
    _sglang(
        "python/sglang/srt/layers/moe/topk.py",
        "slower",
        "top-k",
        "does not use FlashInfer's router kernel for a top-{top_k}, but its own",
        BIASED_GROUPS,
        Condition("K is at most 8", lambda model: model.top_k <= 8),
    ),
    _sglang(
        "python/sglang/srt/layers/quantization/unquant.py",
        "slower",
        "width",
        "does not use aiter's kernels for experts of {width} neurons on AMD",
        Condition("not quantised, on AMD", lambda model: not model.quantization),
        _width_multiple(128),
    ),
    _flashinfer(
        "csrc/trtllm_fused_moe_kernel_launcher.cu; vLLM's fused_moe/experts/trtllm_fp8_moe.py",
        "fails",
        "experts",
        "takes no {experts} experts in its FP8 kernel",
        FP8_KERNEL,
        Condition(
            "E is a multiple of 4, at most 512 and above K",
            lambda model: model.experts % 4 == 0 and model.top_k < model.experts <= 512,
        ),
    ),
    _flashinfer(
        "csrc/trtllm_fused_moe_kernel_launcher.cu",
        "fails",
        "top-k",
        "takes no top-{top_k} of {experts} experts in its FP8 kernel",
        FP8_KERNEL,
        Condition(
            "K is at most 32; with routing groups at most 8, or 22 where E is above 384",
            lambda model: model.top_k <= (32 if model.groups == 1 else 8 if model.experts <= 384 else 22),
        ),
    ),
    Rule(
        "aiter",
        AITER,
        "csrc/kernels/topk_softmax_kernels.cu",
        "slower",
        "experts",
        "routes among {experts} experts by a slower kernel",
        Condition("softmax, no routing groups, on AMD", lambda model: model.groups == 1 and not model.selection_bias),
        Condition("E is a power of two up to 512", lambda model: model.experts in TO_512),
    ),
    _llama(
        "src/llama-hparams.h (LLAMA_MAX_EXPERTS), src/llama-model.cpp",
        "fails",
        "experts",
        "loads no more than 1,024 experts a layer",
        ALL,
        Condition("E is at most 1,024 (512 in versions before)", lambda model: model.experts <= 1024),
    ),
    _llama(
        "src/llama-model.cpp",
        "fails",
        "experts",
        "refuses {experts} experts in this many routing groups",
        GROUPED,
        Condition("E is a multiple of n_group and above it", _even_groups),
    ),
    _llama(
        "ggml/src/ggml-cuda/topk-moe.cu",
        "slower",
        "experts",
        "routes among {experts} experts by slower kernels on CUDA",
        Condition("no routing groups, on CUDA", lambda model: model.groups == 1),
        Condition("E is a power of two up to 512, 288 or 576", lambda model: model.experts in LLAMA_CUDA),
    ),
    _llama(
        "src/llama-quant.cpp (tensor_type_fallback)",
        "larger",
        "width",
        "quantises down projections of {width} columns to its 32-blocks or f16 instead of K-quants",
        Condition("K-quants and I-quants", lambda model: True),
        _width_multiple(256),
    ),
    _llama(
        "src/models/olmoe.cpp and others",
        "fails",
        "head",
        "wants a head of its own, where this model ties it to the embeddings",
        LLAMA_HEADS,
        UNTIED,
        "run",
    ),
)
SERVERS = tuple(dict.fromkeys(rule.server for rule in RULES))
PAGE = "docs/how-to/serving.md"


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule that a model does not keep."""

    server: str
    effect: Effect
    says: str
    needs: str
    version: str
    source: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What servers make of a number of experts; `nearest` is the nearest that suits all of them, None for none.

    It is the number itself where that suits, by the rules on numbers of experts; width and head are another matter.
    """

    experts: int
    top_k: int
    width: int
    full_speed: tuple[str, ...]
    breaches: tuple[Breach, ...]
    nearest: int | None


def broken(model: Served) -> tuple[Rule, ...]:
    """The rules that a model does not keep."""
    return tuple(rule for rule in RULES if rule.whom.holds(model) and not rule.needs.holds(model))


def advise(model: Served, counts: Iterable[int] = ()) -> Advice:
    """What servers make of a model; `counts` are the other numbers of experts that it could have."""
    breaches = tuple(
        Breach(rule.server, rule.effect, said(rule, model), rule.needs.words, rule.version, rule.source)
        for rule in broken(model)
    )
    servers = {breach.server for breach in breaches}
    full_speed = tuple(server for server in SERVERS if server not in servers)

    def suits(count: int) -> bool:
        return all(rule.about != "experts" for rule in broken(replace(model, experts=count)))

    suitable = filter(suits, (model.experts, *counts))
    nearest = min(suitable, key=lambda count: (abs(count - model.experts), -count), default=None)  # the larger of two
    return Advice(model.experts, model.top_k, model.width, full_speed, breaches, nearest)


def warnings(advice: Advice, before: Sequence[Rule] = ()) -> list[str]:
    """One sentence for each server that `advice` speaks against, and one with the nearest number for all.

    What is slower or larger by a rule that the source does not keep either (`before`) is left out.
    """
    alike = {(rule.server, rule.needs.words) for rule in before if rule.effect in ("slower", "larger")}
    says = defaultdict[str, list[str]](list)
    for breach in advice.breaches:
        if (breach.server, breach.needs) not in alike:
            says[breach.server].append(breach.says)
    lines = [f"{server} {'; it '.join(parts)}" for server, parts in says.items()]
    if lines and advice.nearest not in (None, advice.experts):
        lines.append(f"the nearest number of experts that suits all servers is {advice.nearest}; see {PAGE}")
    return lines
