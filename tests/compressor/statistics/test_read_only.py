"""Statistics that nobody can write into: each way of writing that we know, and the ways of reading that must go on."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.statistics.read_only import ReadOnly
from compressor.statistics.statistics import LayerStatistics, RouterArguments

LAYER = MoeLayer("model.layers.3.experts", "block", "router", "unit", 3, experts=4, top_k=2)

REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "an entry": lambda x: x.__setitem__(0, 1e9),
    "a slice": lambda x: x.__setitem__(slice(0, 2), 1e9),
    "a mask": lambda x: x.__setitem__(x > 0, 1e9),
    "mul_": lambda x: x.mul_(2),
    "+=": lambda x: x.__iadd__(1),
    "out=": lambda x: torch.add(x, 1, out=x),
    "one of several out=": lambda x: torch.sort(x.clone(), out=(x, torch.empty(x.shape, dtype=torch.long))),
    "copy_": lambda x: x.copy_(torch.zeros(x.shape)),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0]), 7),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 7),
    "normal_": lambda x: x.normal_(),
    "an initialiser": lambda x: nn.init.zeros_(x),
    "in-place relu": lambda x: nn.functional.relu(x, inplace=True),
    "foreach": lambda x: torch._foreach_mul_([torch.ones(1), x], 2),
    "apply_": lambda x: x.apply_(lambda value: 0),
    "map_": lambda x: x.map_(x, lambda one, other: 0),
    "a flat view": lambda x: x.view(-1).zero_(),
    "a reshaped view": lambda x: x.reshape(-1)[:2].zero_(),
    "a row": lambda x: x[0].zero_(),
    "rows": lambda x: [row.zero_() for row in x],
    "a split": lambda x: x.split(1)[0].zero_(),
    "a transpose": lambda x: x.mT.add_(1),
    "strides": lambda x: x.as_strided((1,), (1,)).zero_(),
    "an alias": lambda x: torch.ops.aten.alias(x).zero_(),
    "an unsafe view": lambda x: torch.ops.aten._unsafe_view(x, [x.numel()]).zero_(),
    "a view of bits": lambda x: x.view(torch.uint8).zero_(),
    "expanded": lambda x: x.expand(2, *x.shape).zero_(),
    "data": lambda x: x.data.zero_(),
    "detach": lambda x: x.detach().zero_(),
    "as_tensor": lambda x: torch.as_tensor(x).zero_(),
    "the same dtype": lambda x: x.to(x.dtype).zero_(),
    "the same device": lambda x: x.cpu().contiguous().zero_(),
    "a parameter's data": lambda x: nn.Parameter(x, requires_grad=False).data.zero_(),
    "another class": lambda x: x.as_subclass(Tensor).zero_(),
    "shared memory": lambda x: torch.empty(0, dtype=x.dtype).set_(x).zero_(),
    "vmap": lambda x: torch.func.vmap(lambda row: row.zero_())(x),
}
HARMLESS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.numpy().fill(0),
    "asarray": lambda x: np.asarray(x).fill(0),
    "numpy and back": lambda x: torch.from_numpy(x.numpy()).zero_(),
    "dlpack": lambda x: torch.from_dlpack(x).zero_(),
    "dlpack to numpy": lambda x: np.from_dlpack(x).fill(0),
    "storage": lambda x: x.untyped_storage().fill_(0),
    "setting data": lambda x: setattr(x, "data", torch.zeros(x.shape)),
    "resizing another": lambda x: torch.zeros(1).resize_as_(x).zero_(),
    "copies": lambda x: [made.zero_() for made in (x.clone(), copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x + 0)],
}


@pytest.mark.parametrize("way", REFUSED)
@given(shape=st.sampled_from([(3, 4), (2, 3, 4), (1, 1)]), data=st.data())
@settings(max_examples=4, deadline=None)
def test_what_would_write_is_refused_with_a_sentence(way: str, shape: tuple[int, ...], data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    held = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    if way in ("apply_", "map_", "copy_", "out="):
        held = held.float()
    before = held.clone()
    with pytest.raises(
        CompressionError, match=r"^statistic 'x' is read-only, for .*; clone\(\) it before writing to it"
    ):
        REFUSED[way](ReadOnly(held, "statistic 'x'"))
    assert torch.equal(held, before)


@pytest.mark.parametrize("way", HARMLESS)
def test_what_leaves_torch_is_a_copy(way: str) -> None:
    held = torch.arange(12.0).view(3, 4)
    HARMLESS[way](ReadOnly(held, "x"))
    assert torch.equal(held, torch.arange(12.0).view(3, 4))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_reading_gives_the_same_bits_as_the_tensor_itself(mode: Callable[[], Any]) -> None:
    held = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([2, 0])
    reads: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.sum(), lambda x: x @ x.mT, lambda x: x[index, :2], lambda x: x.view(4, -1).double().std(1),
        lambda x: torch.stack(list(x)), lambda x: torch.einsum("abc,adc->abd", x, x), lambda x: x[1].argsort(dim=0),
        lambda x: nn.functional.normalize(x, dim=0), lambda x: torch.linalg.svd(x)[1], lambda x: x.softmax(-1),
        lambda x: nn.functional.linear(x, held[0]), lambda x: torch.zeros(4, 5, 6).index_add(0, index, x[:2]),
    ]  # fmt: skip
    guard = ReadOnly(held, "x")
    with mode():
        for number, read in enumerate(reads):
            found = read(guard)
            assert torch.equal(found, read(held)), number
            assert number in (2, 3) or type(found) is Tensor  # what was computed is the plugin's own
    assert guard.tolist() == held.tolist() and float(guard[0, 0, 0]) == float(held[0, 0, 0])
    assert repr(guard) == repr(held) and len(guard) == 4 and guard.shape == held.shape


def test_gradients_pass_through_a_statistic() -> None:
    weight = torch.ones(3, 4, requires_grad=True)
    nn.functional.linear(ReadOnly(torch.arange(8.0).view(2, 4), "x"), weight).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(weight.grad, torch.tensor([4.0, 6.0, 8.0, 10.0]).expand(3, 4))


def test_a_large_sample_is_not_copied() -> None:
    held = torch.zeros(4, 8)
    guard = ReadOnly(held, "x")
    assert guard.data_ptr() == held.data_ptr() and guard[1:].data_ptr() == held[1:].data_ptr()


def test_scikit_learn_and_scipy_take_statistics() -> None:
    from scipy.cluster.hierarchy import linkage
    from scipy.optimize import linear_sum_assignment
    from sklearn.cluster import AgglomerativeClustering, KMeans

    points = torch.tensor([[0.0, 0.0], [0.0, 1.0], [9.0, 9.0], [9.0, 8.0]], dtype=torch.float64)
    guard, table = ReadOnly(points, "x"), ReadOnly(torch.cdist(points, points), "y")
    clusters = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="average").fit_predict(table)
    assert clusters[0] == clusters[1] != clusters[2] == clusters[3]
    assert set(KMeans(2, n_init=1, random_state=0).fit_predict(guard)[:2].tolist()) in ({0}, {1})
    assert linear_sum_assignment(table)[1].tolist() == [0, 1, 2, 3]
    assert linkage(guard, "average").shape == (3, 4)


def layer_statistics() -> LayerStatistics:
    """One with tensors in every place."""
    live = torch.ones(4)
    held = LayerStatistics(LAYER, 2, {"inputs": torch.ones(2, 3)})
    arguments = RouterArguments((torch.ones(2, 3), live), {"mask": torch.ones(2)}, {0: 0, 1: None, "mask": 0})
    values = {"routed_count": torch.ones(4, dtype=torch.float64), "router_arguments": arguments, "heldout": held}
    return LayerStatistics(LAYER, 2, values, by_source=(LayerStatistics(LAYER, 1, {"norm_sum": torch.ones(4)}),))


@pytest.mark.parametrize(
    "place",
    [
        lambda stats: stats.routed_count,
        lambda stats: stats.values["routed_count"],
        lambda stats: stats.heldout.inputs,
        lambda stats: stats.by_source[0].norm_sum,
        lambda stats: stats.router_arguments.positional[0],
        lambda stats: stats.router_arguments.by_keyword["mask"],
    ],
)
def test_every_tensor_of_a_layers_statistics_is_read_only(place: Callable[[LayerStatistics], Tensor]) -> None:
    stats = layer_statistics()
    with pytest.raises(CompressionError, match=r"statistic '\w+' of model.layers.3.experts is read-only"):
        place(stats)[0] = 1e9
    place(stats).data = torch.zeros(4)
    place(stats).numpy().fill(0)
    assert bool((place(stats) == 1).all())


def test_the_containers_of_a_layers_statistics_are_read_only() -> None:
    stats: Any = layer_statistics()
    with pytest.raises(TypeError):
        stats.values["routed_count"] = None
    with pytest.raises(TypeError):
        stats.router_arguments.by_keyword["mask"] = None
    with pytest.raises(AttributeError):
        stats.routed_count = None
    assert set(stats.values) == {"routed_count", "router_arguments", "heldout"}
    assert type(stats.router_arguments.positional[1]) is Tensor  # the layer's own, known by its place in memory
