from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.answers.items import TokenRow
from compressor.errors import CompressionError
from compressor.model.architecture import discover
from compressor.pathways.engine import PathwayModel, PlainForward
from compressor.pathways.options import Span, selected
from tests.support import zoo

REFUSED = {
    "mistral_large4": "cannot be run again without the earlier ones",  # keys and values go from layer to layer
    "ernie4_5_vl_moe": r"vision_moe.gate does not see every token once",
    "diffusion_gemma": "does not see every token once",  # the encoder's tokens, too
    "inkling2_loop": "does not see every token once",
    "openai_privacy_filter": "has no language-model head",
}
LENGTH, START = 12, 9


def engine(name: str, layers: Span = 1, tokens: Span = "last", seed: int = 0) -> PathwayModel:
    model = zoo.build(name, seed)
    model.requires_grad_(False)
    model.config.architectures = [type(model).__name__]  # as a checkpoint's config names it
    place = SimpleNamespace(model=model, device=torch.device("cpu"), keys_under=lambda _: [], load=lambda _: None)
    opened: Any = SimpleNamespace(
        partial=place, architecture=discover(model.config), source=SimpleNamespace(label=name)
    )
    made = PathwayModel(opened, selected(layers, len(opened.architecture.layers)), tokens)
    made.load()
    return made


def rows(model: PathwayModel, seed: int = 3) -> tuple[TokenRow, ...]:
    prompt, one, other = torch.split(zoo.tokens(model.model, 1, LENGTH + 1, seed)[0], [START, LENGTH - START, 1])
    return tuple(TokenRow((*prompt.tolist(), *answer.tolist()), START) for answer in (one, other))


def shift(model: PathwayModel, plain: PlainForward, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return size * torch.randn(len(plain.router_logits), plain.router_logits[0].shape[-1], generator=generator)


@pytest.mark.parametrize("name", zoo.sweep(but=REFUSED))
def test_late_layers_give_the_stock_logits_bit_for_bit(name: str) -> None:
    model = engine(name)
    plain = model.run(rows(model))
    stock = model.model(input_ids=plain.tokens, use_cache=False).logits
    assert torch.equal(plain.logits, stock)
    unmoved = torch.zeros(1, plain.router_logits[0].shape[-1])
    assert torch.equal(model.again(plain, unmoved), stock)
    moved = model.again(plain, shift(model, plain, 3.0))
    before = slice(0, START - 1)  # the last prompt token; experts that are given fewer tokens may round otherwise
    torch.testing.assert_close(moved[:, before], stock[:, before], rtol=1e-4, atol=1e-5)
    assert torch.equal(model.model(input_ids=plain.tokens, use_cache=False).logits, stock)  # nothing stays behind


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & zoo.FAMILIES.keys()))
def test_architectures_whose_late_layers_need_more_are_refused(name: str) -> None:
    def ask() -> None:
        model = engine(name)
        model.run(rows(model))

    with pytest.raises(CompressionError, match=REFUSED[name]) as error:
        ask()
    assert "\n" not in str(error.value)


PLACES = {"last": [8], "scored": [8, 9, 10], 3: [6, 7, 8], "first:2+middle:1": [0, 1, 4], "all": [*range(9)]}


@pytest.mark.parametrize("tokens", PLACES)
@pytest.mark.parametrize(("layers", "numbers"), [(1, [1]), ("all", [0, 1]), ("first:1", [0])])
def test_moved_logits_are_those_of_a_router_that_puts_them_out(layers: Span, numbers: list[int], tokens: Span) -> None:
    """Against the whole stock model with routers written out here."""
    model = engine("mixtral", layers, tokens)
    plain = model.run(rows(model))
    added = shift(model, plain, 2.0)
    found = model.again(plain, added)
    width, lengths = plain.tokens.shape[1], [len(row.tokens) for row in plain.rows]
    assert lengths == [LENGTH, START + 1]
    ends = [length - 1 if tokens == "scored" else START for length in lengths]
    moved = [row * width + place for row, end in enumerate(ends) for place in PLACES[tokens] if place < end]
    gates = [model.model.model.layers[number].mlp.gate for number in numbers]
    own: list[Tensor] = []
    handles = [gate.register_forward_hook(lambda module, args, output: own.append(output[0])) for gate in gates]
    model.model(input_ids=plain.tokens, use_cache=False)
    for handle in handles:
        handle.remove()

    def routed(gate: Any, logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fresh = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
        fresh[moved] = logits[moved]
        values, chosen = fresh.softmax(-1).topk(gate.top_k)
        return fresh, values / values.sum(-1, keepdim=True), chosen

    for number, gate in enumerate(gates):
        wanted = own[number] + added[number]
        gate.forward = lambda hidden, gate=gate, wanted=wanted: routed(gate, wanted, hidden)
    assert torch.equal(found, model.model(input_ids=plain.tokens, use_cache=False).logits)
    assert not torch.equal(found, plain.logits)


def test_the_pathway_is_the_routers_weights_at_the_last_prompt_token() -> None:
    for name, score in (("mixtral", "softmax"), ("deepseek_v3", "sigmoid"), ("deepseek_v4", "sqrt-softplus")):
        model = engine(name)
        plain = model.run(rows(model))
        assert set(model.scores) == {score}
        chosen = dict[str, Tensor]()
        for layer in model.layers:
            model.model.get_submodule(layer.name).register_forward_pre_hook(
                lambda module, args, chosen=chosen, name=layer.name: chosen.update({name: torch.stack(args[1:3])})
            )
        model.model(input_ids=plain.tokens, use_cache=False)
        for pathway, layer in zip(plain.pathway, model.layers, strict=True):
            experts, weights = chosen[layer.name][:, START - 1]
            ratio = pathway[experts.long()] / weights
            torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-4, atol=0)
