"""Saliencies of neurons against autograd through whole stock models, neuron by neuron."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from compressor.model.experts import expert_parameters, intermediate, projections
from compressor.model.moe_layer import MoeLayer
from compressor.progress import Silent
from compressor.steps.split.saliency import saliencies
from tests import zoo
from tests.opened import batches, opened

SEVERAL = pytest.mark.parametrize("name", zoo.sweep(["mixtral", "deepseek_v3", "gpt_oss", "nemotron_h", "gemma4"]))


def pulls(stock: PreTrainedModel, layers: tuple[MoeLayer, ...], ids: Tensor, wanted: Tensor) -> dict[str, list[Tensor]]:
    """By layer: what the experts were called with, and the gradient [T, H] of the summed loss at their output."""
    seen = dict[str, list[Tensor]]()

    def note(name: str, args: tuple[Tensor, ...], output: Tensor) -> None:
        copied = [value.detach().clone() for value in args[:3]]
        output.register_hook(lambda gradient: seen.update({name: [*copied, gradient.reshape(len(copied[0]), -1)]}))

    handles = [
        stock.get_submodule(layer.name).register_forward_hook(
            lambda _, args, kwargs, output, name=layer.name: note(name, (*args, *kwargs.values()), output),
            with_kwargs=True,
        )
        for layer in layers
    ]
    stock.requires_grad_(True)
    logits = stock(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    cross_entropy(logits, wanted, reduction="sum").backward()
    for handle in handles:
        handle.remove()
    return seen


def naive(stock: PreTrainedModel, layer: MoeLayer, calls: list[list[Tensor]]) -> Tensor:
    """1/2 mean(z^2) d' mean(g g') d of each neuron, with the matrix of gradients made."""
    experts, rows = stock.get_submodule(layer.name), list[Tensor]()
    for expert in range(layer.experts):
        down = projections(experts, expert).down.detach().double()  # [H, I]
        inner, slopes = list[Tensor](), list[Tensor]()
        for hidden, index, weights, gradient in calls:
            for token, slot in ((index == expert) & (weights != 0)).nonzero().tolist():
                parameters = expert_parameters(experts, expert)
                inner.append(intermediate(experts, parameters, hidden[token : token + 1])[0].detach().double())
                slopes.append((weights[token, slot] * gradient[token]).double())
        if not inner:
            rows.append(torch.zeros(down.shape[1], dtype=torch.float64))
            continue
        metric = sum(torch.outer(g, g) for g in slopes) / len(slopes)
        energy = torch.stack(inner).square().mean(0)
        rows.append(torch.stack([energy[k] * (down[:, k] @ metric @ down[:, k]) / 2 for k in range(down.shape[1])]))
    return torch.stack(rows)


@SEVERAL
def test_heapr_is_the_equation_by_autograd_of_the_whole_model(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    found = saliencies(model, parts, "heapr", Silent())
    shifted = [torch.cat([part[:, 1:], torch.full((len(part), 1), -100)], 1).flatten() for part in parts]
    layers = model.architecture.layers
    calls = [pulls(stock, layers, part, wanted) for part, wanted in zip(parts, shifted, strict=True)]
    for layer in layers:
        expected = naive(stock, layer, [call[layer.name] for call in calls])
        torch.testing.assert_close(found[layer.name], expected, rtol=2e-3, atol=float(expected.max()) * 1e-5)


def test_kl_takes_tokens_that_the_model_draws(tmp_path: Path) -> None:
    """The same for a seed, and on average what autograd gives for other draws from the whole model's distribution."""
    stock, model = opened("mixtral", tmp_path)
    parts = batches(stock, (1,))
    drawn = [saliencies(model, parts, "kl", Silent(), seed) for seed in range(40)]
    again = saliencies(model, parts, "kl", Silent(), 3)
    layer = model.architecture.layers[0]
    assert torch.equal(drawn[3][layer.name], again[layer.name]) and not torch.equal(
        drawn[3][layer.name], drawn[4][layer.name]
    )
    with torch.no_grad():
        odds = stock(input_ids=parts[0], use_cache=False).logits[0].softmax(-1)
    exact = torch.zeros_like(again[layer.name])
    generator = torch.Generator().manual_seed(9)
    for _ in range(40):  # another sample of the same expectation
        wanted = torch.multinomial(odds, 1, generator=generator)[:, 0]
        stock.zero_grad()
        exact += naive(stock, layer, [pulls(stock, (layer,), parts[0], wanted)[layer.name]]) / 40
    mean = torch.stack([each[layer.name] for each in drawn]).mean(0)
    reached = exact.sum(1) > 0
    assert torch.corrcoef(torch.stack([mean[reached].flatten(), exact[reached].flatten()]))[0, 1] > 0.9
    assert float(mean.sum()) == pytest.approx(float(exact.sum()), rel=0.5)


