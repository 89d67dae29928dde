"""Traced tensors: whatever linear code runs on them, their terms still sum to their values, and pull rows back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from compressor.attribution.tracing import Chain, Context, Step, Traced, parts_of, plain, pull_sum
from compressor.model.architecture import discover
from compressor.model.moe_layer import layers_by_decoder_layer
from tests.support import zoo
from tests.support.linear_maps import evaluate, explicit

H = 6
SHAPES = [(5, H), (1, 5, H), (2, 3, H), (1, 1, H), (1, H), (3, 1, H)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def start(shape: tuple[int, ...], names: str = "ab") -> tuple[Context, list[Traced]]:
    """One component for each name, of random values."""
    context = Context(torch.Size(shape[:-1]).numel())
    return context, [context.start(name, draw(*shape, seed=seed)) for seed, name in enumerate(names)]


def check(value: Any, sum_of: Tensor | None = None) -> Traced:
    """The tensor is traced, and its terms sum to its values, also to the expected ones if given."""
    assert isinstance(value, Traced)
    values = plain(value).float().reshape(value.context.tokens, -1)
    found = evaluate(value.context, value.terms)
    scale = 1 + max(float(evaluate(value.context, (term,)).abs().max()) for term in value.terms)
    torch.testing.assert_close(found.expand_as(values), values, rtol=1e-5, atol=1e-5 * scale)
    if sum_of is not None:
        assert torch.equal(plain(value), sum_of)
    return value


def names(value: Traced) -> list[str]:
    return [term.leaf for term in value.terms]


def rms_norm(x: Any, weight: Tensor) -> Any:
    """RMSNorm as decoder layers write it."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def layer_norm(x: Any, weight: Tensor, bias: Tensor) -> Any:
    """LayerNorm written by hand."""
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-5) * weight + bias


VECTOR, OTHER_VECTOR, MATRIX = draw(H, seed=10), draw(H, seed=11), draw(H, H, seed=12)
Operation = Callable[[Any, Any, Tensor, Tensor], Any]  # two traced, one plain tensor [T, H], one plain factor [T, 1]
LINEAR: dict[str, Operation] = {
    "sum": lambda x, y, p, f: x + y,
    "difference": lambda x, y, p, f: x - y,
    "sum with itself": lambda x, y, p, f: x + x,
    "plus plain": lambda x, y, p, f: x + p,
    "minus plain": lambda x, y, p, f: x - p,
    "plain minus": lambda x, y, p, f: p - x,
    "plus a factor for each token": lambda x, y, p, f: x + f,
    "plus number": lambda x, y, p, f: x + 1.5,
    "plus scalar": lambda x, y, p, f: x + torch.tensor(0.5),
    "scaled sum": lambda x, y, p, f: torch.add(x, y, alpha=2),
    "times number": lambda x, y, p, f: x * 0.7,
    "times vector": lambda x, y, p, f: x * VECTOR,
    "times a factor for each token": lambda x, y, p, f: x * f,
    "over number": lambda x, y, p, f: x / 3,
    "over a factor for each token": lambda x, y, p, f: x / (f.abs() + 1),
    "mean": lambda x, y, p, f: x - x.mean(-1, keepdim=True),
    "mean of a tuple": lambda x, y, p, f: x - torch.mean(x, (-1,), keepdim=True),
    "linear": lambda x, y, p, f: F.linear(x, MATRIX),
    "linear with bias": lambda x, y, p, f: F.linear(x, MATRIX, VECTOR),
    "matrix product": lambda x, y, p, f: x @ MATRIX,
    "rms by hand": lambda x, y, p, f: rms_norm(x, VECTOR),
    "rms": lambda x, y, p, f: F.rms_norm(x, (H,), VECTOR, 1e-6),
    "rms without weight": lambda x, y, p, f: F.rms_norm(x, (H,)),
    "layer norm by hand": lambda x, y, p, f: layer_norm(x, VECTOR, OTHER_VECTOR),
    "layer norm": lambda x, y, p, f: F.layer_norm(x, (H,), VECTOR, OTHER_VECTOR, 0.1),
    "clone": lambda x, y, p, f: x.clone().contiguous().detach(),
    "dropout": lambda x, y, p, f: F.dropout(x, 0.5, training=False),
    "double": lambda x, y, p, f: x.double().to(torch.float32),
    "flattened": lambda x, y, p, f: (x.reshape(-1, H) * VECTOR).view(x.shape),
    "split into heads and back": lambda x, y, p, f: x.view(*x.shape[:-1], 2, H // 2).reshape(x.shape),
    "subtracted in place": lambda x, y, p, f: x.clone().sub_(p),
    "multiplied in place": lambda x, y, p, f: x.clone().mul_(VECTOR),
    "added in place, scaled": lambda x, y, p, f: x.clone().add_(p, alpha=2),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_terms_of_a_linear_operation_sum_to_its_result(name: str, shape: tuple[int, ...]) -> None:
    _, (x, y) = start(shape)
    p, f = draw(*shape, seed=20), draw(*shape[:-1], 1, seed=21)
    expected = LINEAR[name](plain(x), plain(y), p, f)
    found = check(LINEAR[name](x, y, p, f), expected)
    assert "a" in names(found)
    assert all("changed" not in leaf for leaf in names(found))


PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "square": lambda x, y: x.pow(2),
    "product": lambda x, y: x * y,
    "quotient": lambda x, y: x / y,
    "rounded quotient": lambda x, y: torch.div(x, 2, rounding_mode="floor"),
    "activation": lambda x, y: F.silu(x),
    "softmax": lambda x, y: x.softmax(-1),
    "clamp": lambda x, y: x.clamp(min=0),
    "normalised": lambda x, y: F.normalize(x, dim=-1),
    "added to plain in place": lambda x, y: draw(5, H).add_(x),
    "another order": lambda x, y: x.flip(0),
    "fewer": lambda x, y: x[:2],
    "picked": lambda x, y: x[torch.tensor([0, 0, 1])],
    "mean over tokens": lambda x, y: x.mean(0, keepdim=True),
    "mixed by a matrix": lambda x, y: draw(5, 5) @ x,
    "wider by broadcasting": lambda x, y: x + draw(3, 1, H),
    "to logits of heads": lambda x, y: x.view(5, 2, H // 2) * draw(H // 2),
}


@pytest.mark.parametrize("operation", PLAIN.values(), ids=PLAIN)
def test_what_is_not_linear_or_mixes_tokens_is_plain(operation: Callable[[Any, Any], Any]) -> None:
    _, (x, y) = start((5, H))
    found = operation(x, y)
    assert type(found) is Tensor
    assert torch.equal(found, operation(plain(x), plain(y)))


def test_plain_rows_become_a_component_and_vectors_a_constant() -> None:
    context, (x, _) = start((2, 3, H))
    rows = draw(2, 3, H, seed=5)
    found = check(x + rows + VECTOR + 1.0 + rows)
    assert names(found) == ["a", "other", "constant", "constant (2)", "other (2)"]
    assert torch.equal(context.leaves["other"], rows.reshape(-1, H))
    assert context.leaves["constant"].shape == (1, H)
    assert context.leaves["constant (2)"].tolist() == [[1.0] * H]  # as wide as what it was added to


CHANGING: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(draw(5, H, seed=9)),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0, 2]), torch.ones(2, H)),
    "mul_ by itself": lambda x: x.mul_(x),
    "assigned": lambda x: x.__setitem__(0, 7.0),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_change_in_place_that_is_not_linear_makes_a_new_component(name: str) -> None:
    _, (x, _) = start((5, H))
    expected = plain(x).clone()
    CHANGING[name](expected)
    CHANGING[name](x)
    assert names(check(x, expected)) == ["changed in place"]


# --- linear maps ------------------------------------------------------------------------------------------------------


@st.composite
def chains(draw: st.DrawFn, width: int = 5) -> tuple[Chain, int, int]:
    """A chain from vectors of `width`, the width of its images, and a seed for vectors."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    steps: list[Step] = []
    own = width
    for kind in draw(st.lists(st.sampled_from(["number", "vector", "mean", "matrix"]), max_size=6)):
        if kind == "number":
            steps.append(draw(st.sampled_from([-1.0, 0.5, 2.0, 0.0])))
        elif kind == "vector":
            steps.append(torch.randn(own, generator=generator))
        elif kind == "matrix":
            after = draw(st.integers(1, 7))
            steps.append(torch.randn(after, own, generator=generator))
            own = after
        else:
            steps.append(torch.full((own, own), 1 / own))
    return tuple(steps), own, draw(st.integers(0, 2**31))


@given(st.lists(chains(), min_size=1, max_size=3))
def test_pulling_back_is_the_transpose_of_the_explicit_matrices(drawn: list[tuple[Chain, int, int]]) -> None:
    same_width = [chain for chain, width, _ in drawn if width == drawn[0][1]]
    rows = torch.randn(3, drawn[0][1], generator=torch.Generator().manual_seed(drawn[0][2]))
    total = torch.stack([rows.double() @ explicit(chain, 5) for chain in same_width]).sum(0)
    found = pull_sum(rows, same_width).double()
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-4 * (1 + float(total.abs().max())))


# --- the parts of a layer ---------------------------------------------------------------------------------------------


def kinds(name: str, decoder_layer: int) -> dict[str, str]:
    """Kind of each part of a layer, by the module's name in it."""
    model = zoo.skeleton(name)
    architecture = discover(model.config, model)
    full = architecture.decoder_layers[decoder_layer]
    own = layers_by_decoder_layer(architecture.layers).get(full, ())
    found = parts_of(full, model.get_submodule(full), own)
    return {part.removeprefix(f"{full}."): kind for part, kind in found.items()}


@pytest.mark.parametrize(
    ("name", "decoder_layer", "expected"),
    [
        ("mixtral", 0, {"self_attn": "attention", "mlp.experts": "expert"}),
        ("deepseek_v3", 0, {"self_attn": "attention", "mlp": "mlp"}),
        ("deepseek_v3", 1, {"self_attn": "attention", "mlp.experts": "expert", "mlp.shared_experts": "shared"}),
        ("gemma4", 0, {"self_attn": "attention", "mlp": "shared", "experts": "expert"}),
        ("nemotron_h", 0, {"mixer": "attention"}),  # a state-space mixer
        ("nemotron_h", 1, {"mixer.experts": "expert", "mixer.shared_experts": "shared"}),
        ("nemotron_h", 3, {"mixer": "mlp"}),
        ("jamba", 0, {"mamba": "attention", "feed_forward": "mlp"}),
        ("qwen3_next", 1, {"linear_attn": "attention", "mlp.experts": "expert", "mlp.shared_expert": "shared"}),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_parts_are_the_modules_that_write_to_the_stream(
    name: str, decoder_layer: int, expected: dict[str, str]
) -> None:
    assert kinds(name, decoder_layer) == expected
