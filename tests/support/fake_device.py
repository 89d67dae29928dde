"""A pretended device: tensors that say they are on it, computed on the CPU, and refused beside the CPU's own.

Test support. It shows where tensors of two devices meet, without a GPU; it says nothing about time, streams or memory.
It can lack float64, as mps does.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
LACKING = set[torch.dtype]()  # dtypes that the device has not
aten = torch.ops.aten
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
MIXING = INDEXING | {aten.copy_.default, aten._to_copy.default}  # what a device does with the CPU's tensors as well


class Pretended(Tensor):
    """A tensor that says that it is on the device; `inner` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Pretended":
        made: Pretended = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(NAME, 0), requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({self.inner!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # so that results of views are no subclass's own

    def tolist(self) -> Any:
        """The values, as a device hands them out."""
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return computed(func, args, dict(kwargs or {}))


def computed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Carry an operation out on the CPU, and have what would be on the device say so."""
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    if any(type(value) not in (Tensor, Parameter, Pretended) for value in given):
        return NotImplemented  # a tensor that hands on what it holds
    there = [value for value in given if isinstance(value, Pretended)]
    strangers = [value for value in given if not isinstance(value, Pretended) and value.dim() > 0]
    if there and strangers and func not in MIXING:
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found two")
    if there and func in INDEXING and not isinstance(args[0], Pretended):
        raise RuntimeError(f"{func}: indices should be either on cpu or on the same device as the indexed tensor")
    if func is aten._fused_sdp_choice.default:
        return 0  # the plain formula: fused kernels are the real device's
    asked = kwargs.get("device")
    target = bool(there) if asked is None else torch.device(asked).type == NAME
    if func is aten.copy_.default:
        target = isinstance(args[0], Pretended)
    if asked is not None:
        kwargs["device"] = "cpu" if target else asked
    kwargs.pop("pin_memory", None)
    inner_args, inner_kwargs = tree_map(_inner, (tuple(args), kwargs))
    if func is aten.histc.default:  # which the CPU has for floats alone
        inner_args = (inner_args[0].float(), *inner_args[1:])
    result = func(*inner_args, **inner_kwargs)
    known = {id(value.inner): value for value in there}

    def outer(value: Any) -> Any:
        if not isinstance(value, Tensor) or not target or value.device.type == "meta":
            return value
        if value.dtype in LACKING:
            raise TypeError(f"{func}: Cannot convert a tensor to {value.dtype}, which the device does not support")
        return known.get(id(value)) if id(value) in known else Pretended(value)

    return tree_map(outer, result)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Pretended) else value


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return computed(func, args, dict(kwargs or {}))


@contextmanager
def pretended_device() -> Iterator[None]:
    """While this lasts the device is there; what torch is told of it stays for good, so use a process of its own."""
    _setup_privateuseone_for_python_backend(NAME)
    plain = torch.tensor

    def made(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        found = plain(data, **more)  # which asks its device for memory behind the mode's back
        return found if device is None else found.to(device)

    with _Mode(), mock.patch.object(torch, "tensor", made):
        yield


ROUTERS = {"method": "router", "rounds": 1, "sequences": 8, "sequence_length": 32}
DISTILL = {"train": "router", "steps": 2, "tokens_per_step": 64, "sequence_length": 32}
REQUESTS: dict[str, dict[str, Any]] = {  # of `compress`, that compute in many ways
    "auto": {"strategy": "auto", "correct": {"method": "tune", "steps": 2}},
    "split": {"strategy": "hc-smoe", "split": 2, "correct": "ridge"},
    "ream": {"strategy": "ream", "correct": "none", "routers": ROUTERS},
    "enumerate": {"strategy": "enumerate", "correct": "none", "distill": DISTILL},
    "similarity": {"strategy": "data-centric", "correct": "none"},
    "weights": {"strategy": "model-centric", "correct": "none"},
}


def main(model: str, text: str, out: str, lacking: str = "") -> None:
    """Compress a model on the device, which may be `lacking` float64."""
    import compressor
    from compressor.attribution.projecting import Component, Projection, Tally

    with pretended_device():
        there = torch.ones(2, device=NAME)
        try:
            there + torch.ones(2)
        except RuntimeError as refusal:
            print(refusal)
        LACKING.update([torch.float64] if lacking else [])
        scores = torch.randn(3, 2, 4).to(NAME)  # of an attribution, whose tensors are of a class of their own
        tally = Tally(torch.zeros(5, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.bool))
        routers = SimpleNamespace(logits=[scores], layers=(0, 1))
        projection: Any = SimpleNamespace(routers=routers, edges_kept=1, _tally=lambda component: tally)
        component = Component("", "head", "", "")
        Projection._add(projection, component, scores, torch.arange(3).to(NAME), 0, slice(0, 2))
        assert isinstance(tally.by_expert, torch.Tensor) and tally.by_expert.dtype == torch.float64
        assert tally.sums[:4].all() and tally.reaches.all()
        for name, request in REQUESTS.items():
            compressor.compress(
                model, f"{out}/{name}", experts=4, calibration=text, samples=16, sequence_length=32, dtype="float32",
                device=NAME, **request,
            )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
