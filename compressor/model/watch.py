"""Watching one MoE layer: what its router and its experts are called with, and what they and their block put out.

The one place that hooks an MoE layer's modules. The stock computation is not changed; `on_expert_output` runs it expert
by expert (`observed_forward`), which is slower. T tokens, K top-k, E experts, H hidden; n tokens sent to an expert.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from torch import Tensor

from compressor.model.architecture import MoeLayer
from compressor.model.experts import Observe, observed_forward

Called = Callable[[tuple[Any, ...], dict[str, Any], Any], None]  # (arguments, keyword arguments, output) of a module


@dataclass(slots=True)
class Watch:
    """Callbacks for an MoE layer of a live model, while attached; also a context manager, attached within the block.

    Of one call of the layer they come in this order: `on_router` after the router, `on_experts` with hidden [T, H],
    index and weights [T, K] before the experts, `on_expert_output` with each expert's number, tokens [n], gate weights
    [n] and outputs [n, H], `on_output` with hidden and output [T, H] of the experts, and `on_block` after the module
    that holds router and experts, before any other hook there.
    """

    model: Any
    layer: MoeLayer
    on_router: Called | None = None
    on_experts: Callable[[Tensor, Tensor, Tensor], None] | None = None
    on_expert_output: Observe | None = None
    on_output: Callable[[Tensor, Tensor], None] | None = None
    on_block: Called | None = None
    _removals: list[Callable[[], Any]] = field(default_factory=list)

    def attach(self) -> Self:
        """Begin to watch; once attached, begin anew."""
        self.detach()
        layer, removals = self.layer, self._removals
        router, experts, block = map(self.model.get_submodule, (layer.router, layer.name, layer.block))

        def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
            return [*args, *kwargs.values()][:3]

        if (on_experts := self.on_experts) is not None:
            removals.append(
                experts.register_forward_pre_hook(
                    lambda _, args, kwargs: on_experts(*given(args, kwargs)), with_kwargs=True
                ).remove
            )
        if self.on_expert_output is not None:
            experts.forward = partial(observed_forward, experts, observe=self.on_expert_output)
            removals.append(partial(experts.__dict__.pop, "forward", None))
        if (on_output := self.on_output) is not None:
            removals.append(
                experts.register_forward_hook(
                    lambda _, args, kwargs, output: on_output(given(args, kwargs)[0], output), with_kwargs=True
                ).remove
            )
        for module, called in ((router, self.on_router), (block, self.on_block)):
            if called is not None:  # a pass may end a batch in a hook of the block, and nothing comes after that
                hook = partial(_without_module, called)
                removals.append(module.register_forward_hook(hook, with_kwargs=True, prepend=module is block).remove)
        return self

    def detach(self) -> None:
        """Stop watching; the modules are as they were."""
        for remove in self._removals:
            remove()
        self._removals = []

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.detach()


def _without_module(called: Called, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    called(args, kwargs, output)
