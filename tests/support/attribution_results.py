"""Attributions made up by formula, for the tests of what reports on them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from compressor.attribution.figures import Attribution, Output, Receiver, Sender

Values = tuple[float | None, ...]


def module(layer: int) -> str:
    """Name of a layer's experts module."""
    return f"model.layers.{layer}.mlp.experts"


def sender(kind: str, layer: int | None, influence: Sequence[float | None], **others: Any) -> Sender:
    """A sender whose other rows follow from its influence, unless given."""
    number = others.get("number")
    names = {"attention": "self_attn", "head": "self_attn", "expert": "mlp.experts"}
    place = "model.embed_tokens" if layer is None else f"model.layers.{layer}.{names.get(kind, 'mlp')}"
    change = (None if value is None or kind == "head" else 8 * value / (1 + value) for value in influence)
    fields: dict[str, Any] = {
        "name": place if number is None else f"{place}.{number}",
        "module": place,
        "number": None,
        "share": 1.0 if number is None else 0.25,
        "positive": _scaled(influence, 0.5),
        "negative": _scaled(influence, -0.75),
        "rank_change": tuple(change),
        "covariance": tuple(None for _ in influence),
        **others,
    }
    return Sender(kind=kind, layer=layer, influence=tuple(influence), **fields)


def _scaled(values: Sequence[float | None], factor: float) -> Values:
    return tuple(None if value is None else factor * abs(value) ** 0.5 for value in values)


def attribution(
    layers: int = 4,
    experts: int = 8,
    heads: int = 4,
    dense: Sequence[int] = (0,),
    shared: bool = True,
    hubs: Mapping[tuple[int, int], float] | None = None,
    scale: float = 1.0,
    **others: Any,
) -> Attribution:
    """A model whose `dense` layers have an MLP; influence falls with the distance, and rises at the `hubs`.

    `hubs` maps (layer, expert) to how many times stronger than its layer's others an expert is. All influences are
    multiplied by `scale`.
    """
    stronger = {(1, 3): 400.0} if hubs is None else hubs
    reading = [layer for layer in range(layers) if layer not in dense]

    def row(layer: int, size: float, including: bool = False) -> Values:
        """Influence on each receiver; a layer's attention comes before its own router, what follows it does not."""
        return tuple(
            None if receiver < layer or (receiver == layer and not including)
            else scale * size / (1 + receiver - layer) * (1 + (3 * receiver + 5 * layer) % 7 / 7)
            for receiver in reading
        )  # fmt: skip

    senders = [sender("token", None, row(-1, 2.0))]
    for layer in range(layers):
        senders.append(sender("attention", layer, row(layer, 0.3, including=True)))
        for head in range(heads):
            senders.append(sender("head", layer, row(layer, 0.02 * (1 + head), including=True), number=head))
        if layer in dense:
            senders.append(sender("mlp", layer, row(layer, 0.6)))
            continue
        senders.append(sender("moe", layer, row(layer, 0.9)))
        if shared:
            senders.append(sender("shared", layer, row(layer, 0.2)))
        for expert in range(experts):
            size = 0.001 * (1 + (expert * 5 + layer) % 8 / 40) * stronger.get((layer, expert), 1.0)
            senders.append(sender("expert", layer, row(layer, size), number=expert, share=2 / experts))
    fields: dict[str, Any] = {
        "model": "org/tiny-moe",
        "receivers": tuple(Receiver(module(layer), layer, 1.5 + layer, 1e-7 * (1 + layer)) for layer in reading),
        "outputs": tuple(
            Output(module(layer), layer, expert, 100 + expert, 1.0, 2.0 + 0.01 * expert, 0.5 + 0.01 * expert)
            for layer in reading
            for expert in range(experts)
        ),
        "tokens": 4096,
        "calibration": {"source": "/somewhere/wiki.txt", "tokens": 4096},
        "versions": {"torch": "2.13.0"},
        "seconds": {"states": 1.25, "scores": 2.5},
    }
    return Attribution(senders=tuple(senders), **{**fields, **others})


def with_massive(found: Attribution, layer: int, expert: int, entry: float) -> Attribution:
    """The same, but this expert's largest entry is another."""
    return replace(
        found,
        outputs=tuple(
            replace(output, max_entry=entry, max_norm=2 * entry) if (output.layer, output.expert) == (layer, expert)
            else output
            for output in found.outputs
        ),
    )  # fmt: skip
