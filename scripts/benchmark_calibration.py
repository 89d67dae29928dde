"""The calibration pass of `scripts.benchmark`: its time over stock forwards, and what of loading is hidden."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds a call takes, and its result."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def calibration_report(folder: Path, vocabulary: int, device: str, tokens: int) -> None:
    """The streamed pass over stock forwards of the same batches on a model that is in memory already."""
    from transformers import AutoModelForCausalLM

    from compressor.checkpoint.source import locate
    from compressor.data.batches import Calibration
    from compressor.data.documents import as_rows
    from compressor.model.loading import PartialModel, ReadAhead
    from compressor.model.opened import open_model
    from compressor.progress import Silent, quiet_transformers
    from compressor.statistics.statistics import collect

    def settle() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    ids = torch.randint(vocabulary, (max(256, tokens // 256 * 256),), generator=torch.Generator().manual_seed(0))
    batches = as_rows(ids, 256).split(8)
    loading = [0.0]
    load, begin = PartialModel.load, ReadAhead.begin

    def timed_load(self: PartialModel, keys: Any) -> None:
        settle()
        loading[0] += timed(lambda: (load(self, keys), settle()))[0]

    def streamed() -> float:
        model = open_model(locate(str(folder)), device=device)
        needs = frozenset({"routed_count", "gate_weight_sum", "probability_sum"})
        return timed(lambda: ([None for _ in collect(model, needs, Calibration(batches, {}), Silent())], settle()))[0]

    streamed()  # whatever is made once, such as kernels
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    ahead = streamed()
    peak = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else 0
    ReadAhead.begin = lambda self, names: None  # type: ignore[method-assign]
    plain = streamed()
    PartialModel.load = timed_load  # type: ignore[method-assign]
    waiting = streamed()
    PartialModel.load, ReadAhead.begin = load, begin  # type: ignore[method-assign]
    with quiet_transformers():
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    for parameter in stock.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        stock.model(input_ids=batches[0][:1].to(device), use_cache=False)
        settle()
        forward, _ = timed(
            lambda: ([stock.model(input_ids=batch.to(device), use_cache=False) for batch in batches], settle())
        )
    print(
        f"calibration pass on {device} over stock forwards: {(waiting - loading[0]) / forward:.2f} with loading "
        f"excluded, {ahead / forward:.2f} with it ({forward:.1f} s of stock forward, {loading[0]:.1f} s loading)"
    )
    print(
        f"read ahead: {ahead:.2f} s instead of {plain:.2f} s, so {max(0.0, plain - ahead) / loading[0]:.0%} of loading "
        "was hidden" + (f"; at most {peak / 1e6:.0f} MB of the device" if peak else "")
    )
