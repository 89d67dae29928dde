"""A stock model in memory, with routers whose logits are moved: a plain forward, then its late
layers alone once more.

Late are decoder layers from the first one on whose router is moved. B rows, S tokens, M positions
that may be moved, L MoE layers whose routers are moved, E experts."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from compressor.answers.items import TokenRow
from compressor.errors import CompressionError, wrap_faults
from compressor.frozen import frozen
from compressor.model.architecture import head_of
from compressor.model.experts import moe_hooks
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.router_logits import Product, Score, find_score, watched, weights_of
from compressor.pathways.options import SCORED, Span, selected

# of the largest logit, by which recomputed logits may differ on a machine that adds in any order
AGREE = 0.02
REMEDIES = (
    "take shorter items, or --device cpu",
    "see whether stock transformers alone can run it",
)


@frozen
class PlainForward:
    """A plain forward of some rows, with everything needed to recompute its late layers."""

    rows: tuple[TokenRow, ...]
    tokens: Tensor  # [B, S], without the last one of each row, whose logits are not needed
    early_outputs: Mapping[str, Any]  # by early decoder layer
    moved: Tensor  # [M] positions among all B * S
    router_logits: tuple[Tensor, ...]  # of each moved layer at the moved positions, [M, E]
    # [all MoE layers, E] of the last prompt token of the first row, float32 on the CPU
    pathway: Tensor
    logits: Tensor  # [B, S, V]
    work: int  # decoder layers times tokens


@dataclass
class PathwayModel:
    """A model that can be run again with other router logits in some MoE layers; `load` reads its
    weights.

    `work` counts decoder layers times tokens, twice as much for a backward pass.
    """

    opened: OpenModel
    layer_numbers: tuple[int, ...]  # of the MoE layers whose routers are moved
    tokens: Span = "last"
    # how each MoE layer's router makes weights of logits; found on the first rows
    scores: tuple[Score, ...] = ()
    work: int = 0
    _checked: bool = field(default=False, repr=False)

    @property
    def model(self) -> Any:
        return self.opened.partial.model

    @property
    def layers(self) -> tuple[MoeLayer, ...]:
        return self.opened.architecture.layers

    def load(self) -> None:
        """Read all weights; raises `CompressionError` for a model without a language-model head."""
        if head_of(self.model) is None:
            raise CompressionError(
                f"{type(self.model).__name__} has no language-model head, so it answers no item"
            )
        with wrap_faults(f"{self.opened.source.label} cannot be loaded", *REMEDIES):
            self.opened.partial.load(self.opened.partial.keys_under(""))

    @torch.no_grad()
    def run(self, rows: Sequence[TokenRow]) -> PlainForward:
        """Run the stock model on rows of one prompt, padded on the right, which no token before
        looks at.

        Raises `CompressionError` for an architecture whose late layers cannot be run again by
        themselves."""
        tokens = pad_sequence([torch.tensor(row.tokens[:-1]) for row in rows], batch_first=True)
        calls = {layer.name: list[Tensor]() for layer in self.layers}
        choices: dict[str, tuple[Tensor, Tensor]] = {}
        early_outputs: dict[str, Any] = {}
        decoder_layers = self.opened.architecture.decoder_layers
        first_moved = self.layers[self.layer_numbers[0]].decoder_layer

        def keep_logits(layer: str, product: Product) -> None:
            calls[layer].append(product.logits.reshape(-1, product.logits.shape[-1]).clone())

        def keep_choice(layer: str, hidden: Tensor, experts: Tensor, weights: Tensor) -> None:
            choices[layer] = experts.clone(), weights.clone()

        def keep_output(decoder_layer: str, module: nn.Module, args: Any, output: Any) -> None:
            # a later layer may write into it
            early_outputs[decoder_layer] = tree_map_only(Tensor, Tensor.clone, output)

        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(watched(self.model, layer, partial(keep_logits, layer.name)))
                if not self.scores:
                    keep = partial(keep_choice, layer.name)
                    stack.enter_context(moe_hooks(self.model, layer, on_experts=keep))
            for decoder_layer in decoder_layers[: decoder_layers.index(first_moved)]:
                module = self.model.get_submodule(decoder_layer)
                hook = module.register_forward_hook(partial(keep_output, decoder_layer))
                stack.callback(hook.remove)
            logits = self._forward(tokens)
        if not bool(logits.isfinite().all()):
            raise CompressionError(
                f"{self.opened.source.label} gives logits that are not finite, so its answers "
                "mean nothing; check its weights, or pass --dtype float32 if they are sound"
            )
        for layer in self.layers:
            if [len(call) for call in calls[layer.name]] != [tokens.numel()]:
                raise CompressionError(
                    f"{layer.router} does not see every token once, so its tokens have no "
                    "pathway; pathways of this architecture cannot be optimised"
                )
        router_logits = [calls[layer.name][0] for layer in self.layers]
        if not self.scores:
            pairs = zip(self.layers, router_logits, strict=True)
            self.scores = tuple(find_score(call, *choices[layer.name]) for layer, call in pairs)
        positions = list[int]()  # that are moved
        for number, row in enumerate(rows):
            first = number * tokens.shape[1]
            if self.tokens == SCORED:
                in_row: Sequence[int] = range(row.start - 1, len(row.tokens) - 1)
            else:
                in_row = selected(self.tokens, row.start)
            positions += [first + position for position in in_row]
        moved = torch.tensor(positions, device=self.opened.partial.device)
        last = rows[0].start - 1
        pathway = [
            weights_of(call[last], score).cpu()
            for call, score in zip(router_logits, self.scores, strict=True)
        ]
        work = len(decoder_layers) * tokens.numel()
        self.work += work
        plain = PlainForward(
            rows=tuple(rows),
            tokens=tokens,
            early_outputs=early_outputs,
            moved=moved,
            router_logits=tuple(router_logits[number][moved] for number in self.layer_numbers),
            pathway=torch.stack(pathway),
            logits=logits,
            work=work,
        )
        if not self._checked:
            self._check(plain)
        return plain

    def again(self, plain: PlainForward, shift: Tensor) -> Tensor:
        """Return logits [B, S, V] with `shift` [L, E] added to the moved routers' logits at the
        moved positions.

        The routers are set to that whatever the layers before now output. Gradients go back to a
        `shift` that requires them. A shift of zeros gives the plain logits bit for bit."""

        def set_rows(target: Tensor, product: Product) -> Tensor:
            flat = product.logits.reshape(-1, product.logits.shape[-1])
            return flat.index_copy(0, plain.moved, target.to(flat)).reshape(product.logits.shape)

        with ExitStack() as stack:
            moved = zip(self.layer_numbers, plain.router_logits, shift, strict=True)
            for number, logits, added in moved:
                target = partial(set_rows, logits + added.to(logits))
                stack.enter_context(watched(self.model, self.layers[number], target))
            # early layers return what they returned before
            for decoder_layer, output in plain.early_outputs.items():
                module = self.model.get_submodule(decoder_layer)
                module.forward = lambda *args, output=output, **kwargs: tree_map_only(
                    Tensor, Tensor.clone, output
                )
                stack.callback(module.__dict__.pop, "forward", None)
            logits = self._forward(plain.tokens)
        layers = len(self.opened.architecture.decoder_layers) - len(plain.early_outputs)
        self.work += layers * plain.tokens.numel() * (3 if logits.requires_grad else 1)
        return logits

    def _forward(self, tokens: Tensor) -> Tensor:
        with wrap_faults(f"{self.opened.source.label} cannot be run on an item", *REMEDIES):
            logits: Tensor = self.model(
                input_ids=tokens.to(self.opened.partial.device), use_cache=False
            ).logits
        return logits

    def _check(self, plain: PlainForward) -> None:
        """Refuse an architecture whose late layers, unmoved, do not give the plain logits again."""
        work = self.work
        unmoved = torch.zeros(len(plain.router_logits), plain.router_logits[0].shape[-1])
        try:
            difference = (self.again(plain, unmoved) - plain.logits).abs().max()
            agree = float(difference) <= AGREE * float(plain.logits.abs().max())
        except CompressionError:
            agree = False
        if not agree:
            raise CompressionError(
                f"the late layers of {type(self.model).__name__} cannot be run again without the "
                "earlier ones; pathways of this architecture cannot be optimised"
            )
        self._checked = True
        self.work = work
