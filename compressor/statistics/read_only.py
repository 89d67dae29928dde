"""Tensors that can be read like any other and not be written to, so that all strategies read the same figures.

A `ReadOnly` holds a tensor without lending out its memory. Every operation of torch passes `__torch_dispatch__`, whose
operator schemas say which arguments are written to: such an operation is refused, and views of the held memory are
read-only in turn. What leaves torch (`numpy()`, `tolist()`, dlpack, pickle) is a copy. Results have the bits that they
would have of a plain tensor, but for the few operations, such as svdvals, that take another path for any subclass.
"""

from functools import cache
from itertools import compress
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from compressor.errors import CompressionError

LENDING = frozenset({"aten::set_"})  # operators that hand a tensor's memory to another one


class ReadOnly(Tensor):
    """A tensor [any shape] whose values nobody can change through it; `label` names it where somebody tries."""

    _held: Tensor
    _label: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Self], held: Tensor, label: str) -> Self:
        """Read-only access to `held`, whose memory is shared and not copied."""
        made: Self = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=held.device,
        )
        made._held, made._label = held, label
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the held tensors, unless it would write to one."""
        kwargs = kwargs or {}
        guards = _guards((args, kwargs))
        places, names, lends = _written(func)
        written = [*(args[place] for place in places if place < len(args)), *map(kwargs.get, names)]
        for guard in guards if lends else _guards(written):
            guard._refuse()
        memory = {guard._held.untyped_storage()._cdata: guard._label for guard in guards}

        def guarded(found: Any) -> Any:
            if not isinstance(found, Tensor) or isinstance(found, cls):
                return found
            label = memory.get(found.untyped_storage()._cdata)
            return found if label is None else cls(found, label)

        with torch.inference_mode(False):  # a view that is made in that mode cannot be wrapped outside of it
            return tree_map(guarded, func(*tree_map(opened, args), **tree_map(opened, kwargs)))

    def _refuse(self, *_: Any) -> NoReturn:
        raise CompressionError(
            f"{self._label} is read-only, for the next strategy reads it, too; clone() it before writing to it"
        )

    apply_ = map_ = map2_ = _refuse  # type: ignore[assignment]  # these pass by `__torch_dispatch__`

    def numpy(self, *, force: bool = False) -> Any:
        """A copy as an array."""
        return self._held.numpy(force=force).copy()

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self._held.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of a copy."""
        return self._held.clone().untyped_storage()

    def storage(self) -> Any:
        """The memory of a copy."""
        return self._held.clone().storage()

    def data_ptr(self) -> int:
        """The place in memory, to tell tensors apart."""
        return self._held.data_ptr()

    def __dlpack__(self, **wanted: Any) -> Any:
        return self._held.clone().__dlpack__(**wanted)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._held.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._held.clone().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._held)


def opened(value: Any) -> Any:
    """The tensor that a `ReadOnly` holds; anything else as it is."""
    return value._held if isinstance(value, ReadOnly) else value


def _guards(values: Any) -> list[ReadOnly]:
    """Every `ReadOnly` among nested arguments."""
    return [value for value in tree_leaves(values) if isinstance(value, ReadOnly)]


@cache
def _written(func: Any) -> tuple[tuple[int, ...], tuple[str, ...], bool]:
    """Places and names of the arguments that an operator writes to, and whether it lends out memory, by its schema."""
    arguments = func._schema.arguments
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    names = tuple(argument.name for argument in compress(arguments, written))
    return tuple(compress(range(len(arguments)), written)), names, func._schema.name in LENDING
