"""What one MoE layer was called with and put out on every calibration token, kept for correcting it.

T tokens, K top-k, H hidden. Tensors stay in the computing dtype; past a budget they lie in unlinked mapped files.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from compressor.model.architecture import MoeLayer
from compressor.model.buffers import allocate, token_dim


class _Rows:
    """Rows appended batch by batch to one tensor whose final length is foreseen."""

    def __init__(self, expected: int) -> None:
        self.expected, self.used = expected, 0
        self._buffer: torch.Tensor | None = None

    def append(self, rows: torch.Tensor) -> None:
        need = self.used + len(rows)
        if self._buffer is None or need > len(self._buffer):
            grown = allocate((max(self.expected, need), *rows.shape[1:]), rows.dtype, rows.device)
            if self._buffer is not None:
                grown[: self.used] = self._buffer[: self.used]
            self._buffer = grown
        self._buffer[self.used : need] = rows
        self.used = need

    @property
    def value(self) -> torch.Tensor:
        return torch.zeros(0, 1) if self._buffer is None else self._buffer[: self.used]


@dataclass(slots=True)
class _Argument:
    """One argument of the router: by tokens (`dim` counts them), the experts' own input, a block's tensor, or plain."""

    keyword: str | None
    dim: int | None = None
    rows: _Rows | None = None  # None with a `dim`: it is what the experts get
    key: str | None = None  # a parameter or buffer of the block, by name
    plain: Any = None




@dataclass(slots=True)
class Recording:
    """Inputs [T, H] and outputs [T, H] of a layer's experts module, and the router's arguments, on the same tokens."""

    layer: MoeLayer
    expected: int  # tokens foreseen
    heldout: list[bool] = field(default_factory=list)  # of each batch seen
    sizes: list[int] = field(default_factory=list)
    arguments: list[_Argument] = field(default_factory=list)
    _inputs: _Rows = field(init=False)
    _outputs: _Rows = field(init=False)
    _call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    _handles: list[Any] = field(default_factory=list)
    _own: dict[int, str] = field(default_factory=dict)
    _is_heldout: bool = False

    def __post_init__(self) -> None:
        self._inputs, self._outputs = _Rows(self.expected), _Rows(self.expected)

    def attach(self, model: Any) -> None:
        """Start recording the layer of `model`."""
        block = model.get_submodule(self.layer.block)
        self._own = {id(value): name for name, value in (*block.named_parameters(), *block.named_buffers())}
        self._handles = [
            model.get_submodule(self.layer.router).register_forward_pre_hook(self._before_router, with_kwargs=True),
            model.get_submodule(self.layer.name).register_forward_hook(self._after_experts),
        ]

    def detach(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._call = [], None

    def enter(self, heldout: bool) -> None:
        """Say what the next batch is for."""
        self._is_heldout = heldout

    def _before_router(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = (args, kwargs)

    def _after_experts(self, module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        hidden = args[0]
        if self._call is None or hidden.numel() == 0:
            return
        positional, by_keyword = self._call
        named = [*((None, value) for value in positional), *by_keyword.items()]
        if not self.arguments:
            self.arguments = [self._described(keyword, value, hidden) for keyword, value in named]
        for argument, (_, value) in zip(self.arguments, named, strict=True):
            if argument.rows is not None:
                argument.rows.append(value if argument.dim == 0 else value.flatten(0, 1))
        self._inputs.append(hidden)
        self._outputs.append(output)
        self.heldout.append(self._is_heldout)
        self.sizes.append(len(hidden))
        self._call = None

    def _described(self, keyword: str | None, value: Any, hidden: torch.Tensor) -> _Argument:
        if id(value) in self._own:
            return _Argument(keyword, key=self._own[id(value)])
        dim = token_dim(value, len(hidden))
        if dim is None:
            return _Argument(keyword, plain=value)
        same = value.data_ptr() == hidden.data_ptr() and value.numel() == hidden.numel()
        return _Argument(keyword, dim, None if same else _Rows(self.expected))

    @property
    def inputs(self) -> torch.Tensor:
        """[T, H] what the experts were given."""
        return self._inputs.value

    @property
    def outputs(self) -> torch.Tensor:
        """[T, H] what the original experts module put out."""
        return self._outputs.value

    def positions(self, heldout: bool) -> torch.Tensor:
        """Positions [n] of the tokens that are held out, or of the others."""
        starts = [sum(self.sizes[:number]) for number in range(len(self.sizes))]
        found = [
            torch.arange(start, start + size)
            for start, size, kept in zip(starts, self.sizes, self.heldout, strict=True)
            if kept is heldout
        ]
        return torch.cat(found) if found else torch.arange(0)

    def router_arguments(self, rows: torch.Tensor, block: Any) -> tuple[list[Any], dict[str, Any]]:
        """The router's arguments for the tokens at `rows` [n], in float32; tensors of its parent are `block`'s own."""
        positional: list[Any] = []
        by_keyword: dict[str, Any] = {}
        for argument in self.arguments:
            value = argument.plain
            if argument.key is not None:
                owner, _, name = argument.key.rpartition(".")
                value = getattr(block.get_submodule(owner), name)
            elif argument.dim is not None:
                source = self.inputs if argument.rows is None else argument.rows.value
                value = source[rows]
                value = value.float() if value.is_floating_point() else value
                value = value[None] if argument.dim == 1 else value
            if argument.keyword is None:
                positional.append(value)
            else:
                by_keyword[argument.keyword] = value
        return positional, by_keyword
