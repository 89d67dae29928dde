"""Faults planted in stock models are named, from a changed folder alone or from answers beside the sound model."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.checkpoint.source import locate
from compressor.golden.answers import GoldenAnswers, Top
from compressor.golden.causes import find_cause
from compressor.golden.checking import ask_folder
from compressor.golden.compare import Answered, compare
from compressor.golden.measure import make_golden, top_of
from compressor.progress import Silent
from tests.support import zoo

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
Plant = Callable[[Any], object]


def routers(model: nn.Module) -> Iterator[Any]:
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")) and hasattr(module, "weight") and hasattr(module, "top_k"):
            yield module


def permute(model: nn.Module, order: Sequence[int]) -> None:
    for value in (value for experts in zoo.experts(model).values() for value in experts.parameters()):
        value.copy_(value[list(order)])


def swap(model: nn.Module, fewest: int = 2) -> None:
    for experts in zoo.experts(model).values():
        for name, value in experts.named_parameters():
            if value.dim() < fewest:
                continue
            if "gate_up" in name and experts.is_transposed:
                value.copy_(torch.stack([value[..., 1::2], value[..., 0::2]], -1).flatten(-2))
            elif "gate_up" in name:
                value.copy_(torch.cat([*reversed(value.chunk(2, 1))], 1))


def unnormalise(model: nn.Module) -> None:
    for router in routers(model):
        factor = getattr(router, "routed_scaling_factor", 1.0)

        def forward(hidden: Tensor, router: Any = router, stock: Any = router.forward, factor: float = factor) -> Any:
            logits, _, index = stock(hidden)
            scores = logits.sigmoid() if hasattr(router, "e_score_correction_bias") else logits.softmax(-1)
            return logits, scores.gather(1, index) * factor, index

        router.forward = forward


def drop_bias(model: nn.Module) -> None:
    for module in (*zoo.experts(model).values(), *routers(model)):
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if "bias" in name:
                value.zero_()


def one_more(model: Any) -> None:
    model.config.num_experts_per_tok += 1
    for router in routers(model):
        router.top_k += 1


def scale(model: nn.Module) -> None:
    next(iter(zoo.experts(model).values())).down_proj.mul_(2)


def shift_router(model: nn.Module) -> None:
    weight = [*routers(model)][-1].weight
    weight.copy_(weight.roll(1, 0))


def zero(model: nn.Module) -> None:
    for value in [*zoo.experts(model).values()][-1].parameters():
        value[5] = 0


def shift_vocabulary(model: Any) -> None:
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight.copy_(module.weight.roll(1, 0))


FAULTS: dict[str, tuple[str, Plant]] = {
    "permuted": ("shifted by one against", lambda model: permute(model, [*range(1, 8), 0])),
    "swapped": ("gate and up projections are swapped", swap),
    "weights swapped": ("gate and up projections are swapped", lambda model: swap(model, 3)),
    "unnormalised": ("not normalised", unnormalise),
    "biases": ("bias is missing", drop_bias),
    "top-k": ("num_experts_per_tok", one_more),
    "scale": ("multiplied by about 2 in layer", scale),
    "router": ("shifted by one against", shift_router),
    "zeroed": ("some expert", zero),
    "vocabulary": ("the vocabulary is shifted", shift_vocabulary),
}
WEIGHTS = {  # what a changed folder says
    "permuted": "against their router",
    "reversed": "are permuted against their router",
    "swapped": "gate and up projections are swapped",
    "weights swapped": "gate and up projections are swapped",
    "biases": "bias is zero",
    "scale": "is multiplied by about 2",
    "router": "are shifted by 1",
    "zeroed": "expert 5 of",
    "vocabulary": "are shifted by 1",
}
WITH_BIAS = {"biases": ("deepseek_v3", "gpt_oss"), "weights swapped": ("gpt_oss",)}


@cache
def golden_of(family: str) -> GoldenAnswers:
    folder = zoo._models() / f"golden {family}"
    zoo.save(family, folder)
    return make_golden(locate(str(folder)), "cpu")


@torch.no_grad()
def faulty(family: str, plant: Plant) -> Any:
    model = zoo.build(family)
    plant(model)
    return model


@torch.no_grad()
def answered(golden: GoldenAnswers, model: Any) -> Answered:
    """The answers of a stock model in memory, as a server would give them."""
    top = list[Top]()
    for prompt in golden.prompts:
        top += top_of(zoo.logits(model, torch.tensor([prompt.ids]))[0, list(prompt.positions)])
    return Answered("it", top, "bfloat16")


def cases(few: Sequence[str], faults: Sequence[str] = tuple(FAULTS)) -> Iterator[Any]:
    for family in FAMILIES:
        for fault in faults:
            if family in WITH_BIAS.get(fault, FAMILIES):
                yield (family, fault) if f"{family} {fault}" in few else zoo.full(family, fault)


@pytest.mark.parametrize(("family", "fault"), cases(("mixtral router", "mixtral top-k")))
def test_answers_name_the_fault(family: str, fault: str) -> None:
    golden = golden_of(family)
    name, plant = FAULTS[fault]
    given = answered(golden, faulty(family, plant))
    verdict = compare(golden, given)
    assert verdict.verdict == "different"
    cause = find_cause(golden, zoo._models() / f"golden {family}", given, verdict.allowed, "cpu")
    assert cause is not None and name in cause, cause


FEW = [f"{family} {fault}" for family in ("mixtral", "deepseek_v3") for fault in ("reversed", "scale")]


@pytest.mark.parametrize(("family", "fault"), cases(FEW, tuple(WEIGHTS)))
def test_a_changed_folder_names_the_fault_by_itself(family: str, fault: str, tmp_path: Path) -> None:
    plant = FAULTS[fault][1] if fault in FAULTS else lambda model: permute(model, range(7, -1, -1))
    faulty(family, plant).save_pretrained(tmp_path)
    check_folder(golden_of(family), tmp_path, WEIGHTS[fault])


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"num_experts_per_tok": 3}, "num_experts_per_tok"), ({"norm_topk_prob": False}, "norm_topk_prob")],
)
def test_a_changed_config_is_named(changed: dict[str, Any], name: str, tmp_path: Path) -> None:
    model = zoo.build("qwen3_moe")
    model.config.update(changed)
    model.save_pretrained(tmp_path)
    check_folder(golden_of("qwen3_moe"), tmp_path, name)


def test_another_model_has_no_cause_in_answers() -> None:
    golden = golden_of("mixtral")
    given = answered(golden, zoo.build("mixtral", seed=7))
    assert find_cause(golden, zoo._models() / "golden mixtral", given, 0.01, "cpu") is None


def check_folder(golden: GoldenAnswers, folder: Path, name: str) -> None:
    source = locate(str(folder))
    given = ask_folder(golden, source, "cpu", Silent())
    verdict = compare(golden, given)
    cause = find_cause(golden, folder, given, verdict.allowed, "cpu")
    assert verdict.verdict == "different"
    assert cause is not None and name in cause, cause
