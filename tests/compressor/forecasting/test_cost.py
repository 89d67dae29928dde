"""Work that is counted beforehand, beside what torch counts while a stock model, and a whole compression, compute."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import compressor
from compressor.distributed.present import Ranks, enter
from compressor.forecasting import estimate
from compressor.forecasting.cost import ExpertShape, Text, forward
from compressor.forecasting.estimate import Forecast, Part, duration, forecast_compression
from compressor.forecasting.machine import Machine, Product, Slowest
from compressor.planning import answering
from compressor.planning.answering import settle
from compressor.planning.request import Request
from compressor.planning.run import open_run
from compressor.steps.correct import ridge
from compressor.steps.correct.refit import Correction
from tests import small, zoo
from tests.opened import opened

LENGTH, SHORT, SEQUENCES = 48, 12, 64  # kernels of attention on a processor are not counted: short text has little


class Counting(Machine):
    """A machine of one operation a second, and nothing else takes time."""

    def seconds(self, product: Product) -> float:
        return product.flops

    def update_seconds(self, rows: int, columns: int) -> float:
        return 0.0

    def reading_rate(self, file: Path) -> float:
        return float("inf")

    def writing_rate(self, folder: Path) -> float:
        return float("inf")


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(query[:3]) * key[-2] * (query[-1] + value[-1])


UNCOUNTED: dict[Any, Any] = {  # by torch's counter
    torch.ops.aten._grouped_mm: lambda rows, matrices, *_, **__: 2 * math.prod(rows) * matrices[-1],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten.linalg_cholesky_ex: lambda matrix, *_, **__: matrix[-1] ** 3 // 3,
    torch.ops.aten.cholesky_solve: lambda right, factor, *_, **__: 2 * factor[-1] ** 2 * right[-1],
}


def counted(work: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_a_forward_against_torch_on_the_stock_model(name: str, tmp_path: Path) -> None:
    """Shared experts and dense layers included; what rotary embeddings multiply is left out of the count."""
    stock, model = opened(name, tmp_path)
    stock.set_attn_implementation("eager")
    stock.set_experts_implementation("eager")
    tokens = zoo.tokens(stock, 4, LENGTH, seed=1)
    with torch.no_grad():
        whole = counted(lambda: stock(input_ids=tokens, use_cache=False))
        bare = counted(lambda: stock.model(input_ids=tokens, use_cache=False))
    text = Text(4, LENGTH, 2)
    found, headed = (sum(product.flops for product in forward(model, text, head)) for head in (False, True))
    assert found == pytest.approx(bare, rel=0.03)
    assert headed - found == pytest.approx(whole - bare)
    leave = enter(Ranks(0, 4))
    shared = estimate.Estimate(model, Counting(torch.device("cpu"))).passing(text)
    leave()
    assert shared == pytest.approx(estimate.FORWARD * found / 4)


@pytest.mark.parametrize(
    ("strategy", "correct", "width"),
    [("reap", "none", 1024), ("hc-smoe", "ridge", 1024), ("hc-smoe", "ridge", 48), ("reap", "tune", 1024)],
)
def test_a_whole_compression_against_torch(
    strategy: str, correct: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A width of two experts makes two blocks of the four that stay."""
    monkeypatch.setattr(estimate, "FORWARD", 1.0)
    monkeypatch.setattr(ridge, "MOST_BLOCK", width)
    monkeypatch.setattr(ridge, "LEAST_BLOCK", width)
    monkeypatch.setattr(answering, "Correction", partial(Correction, steps=5))
    folder, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    wanted = {
        "experts": 4, "strategy": strategy, "correct": correct, "calibration": str(text), "dtype": "float32",
        "samples": SEQUENCES, "sequence_length": SHORT, "device": "cpu",
    }  # fmt: skip
    done = counted(lambda: compressor.compress(str(folder), tmp_path / "out", **wanted))
    with open_run(str(folder), None, "float32", "cpu") as run:
        asked = Request(**wanted)
        found = forecast_compression(
            run.model, asked, settle(run.model, asked), tmp_path, Counting(torch.device("cpu"))
        )
    assert found.seconds == pytest.approx(done, rel=0.1)
    assert {part.name for part in found.parts if part.seconds} <= {"calibration", "choice", correct}


def test_shapes_and_few_tokens(tmp_path: Path) -> None:
    _, model = opened("nemotron_h", tmp_path)  # experts without a gate
    layer = model.architecture.layers[0]
    shape = ExpertShape.of(model, layer)
    down = model.partial.model.get_submodule(layer.name).down_proj
    assert (shape.experts, shape.hidden, shape.inner, shape.into) == (*down.shape, down.shape[2])
    few = shape.applied(1, 3.0, torch.float32)  # a token at its K experts, a row each
    assert [(product.rows, product.times) for product in few] == [(1, 3.0 * shape.top_k)] * 2
    assert sum(product.flops for product in few) == 3 * shape.top_k * 2 * shape.weights


def test_a_machine_measures_each_shape_once_and_goes_on_at_its_rate() -> None:
    machine = Machine(torch.device("cpu"))
    one = machine.seconds(Product(64, 32, 32))
    assert one > 0 and machine.seconds(Product(64, 32, 32, 10)) == pytest.approx(10 * one)
    huge = Product(10**9, 32, 32)
    assert machine.seconds(huge) == pytest.approx(machine.seconds(Product(10**8, 32, 32)) * 10)
    assert machine.update_seconds(8, 4) == machine.update_seconds(8, 4) > 0


def test_words() -> None:
    told = [duration(seconds) for seconds in (0.2, 40, 100, 4000, 5399, 6000, 90_000, 200_000)]
    assert told == ["1 s", "40 s", "2 min", "67 min", "90 min", "1.7 h", "25 h", "2 days"]
    made = Forecast((Part("calibration", 130), Part("choice", 3), Part("tune", 110)), "cpu")
    assert str(made) == "about 4 min: calibration 2 min, tune 2 min" and made.is_long and not made.asks
    slow = Forecast((Part("tune", 7000),), "cpu", (("with --correct ridge", 600),))
    assert str(slow) == "about 1.9 h: tune 1.9 h (with --correct ridge about 10 min)" and slow.asks
    assert not Forecast(slow.parts, "cuda", slow.quicker).asks
    assert not Forecast((Part("write", 19),), "cpu").is_long


def test_nothing_is_measured_for_a_short_run_or_without_a_listener() -> None:
    asked: list[Machine | None] = []

    def made(machine: Machine | None) -> Forecast:
        asked.append(machine)
        return Forecast((Part("write", seconds),), "cpu")

    class Model:
        class partial:  # noqa: N801
            device = torch.device("cpu")

        class checkpoint:  # noqa: N801
            tensors = ("a tensor",)

    told: list[Forecast] = []
    for seconds, listener in ((19.0, told.append), (30.0, None), (30.0, told.append)):  # noqa: B007
        estimate.announce_long(listener, made, Model)  # type: ignore[arg-type]
    assert [type(machine) for machine in asked] == [Slowest, Slowest, type(None)]
    assert [entry.seconds for entry in told] == [30.0]
