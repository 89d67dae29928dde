"""Data-centric: distances of a stock model's outputs by plain loops."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.progress import Silent
from compressor.statistics.statistics import collect
from strategies import data_centric
from strategies.data_centric import distances
from tests.compressor.steps.prune.test_similarity import naive_cka
from tests.support.opened_models import batches, calibration, one_expert, opened, plain_calls


def naive(outputs: Tensor, similarity: str) -> Tensor:
    if similarity != "mean-output":
        return 1 - naive_cka(outputs, None if similarity == "linear-cka" else 0.8)
    means = [output.double().mean(0) for output in outputs]
    rows = [torch.stack([(one - other).norm() for other in means]) for one in means]
    return torch.stack(rows)


@pytest.mark.parametrize("similarity", data_centric.SIMILARITIES)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_distances_of_a_stock_models_outputs_equal_a_loop(name: str, similarity: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    calls = plain_calls(stock, model.architecture, parts)
    for stats in collect(model, frozenset({"expert_outputs"}), calibration(parts), Silent()):
        hidden, _, _ = calls[stats.layer.name].joined()
        outputs = torch.stack([one_expert(stock.get_submodule(stats.layer.name), e, hidden) for e in range(8)])
        found = distances(stats.expert_outputs, similarity)[0]
        torch.testing.assert_close(found, naive(outputs, similarity), rtol=1e-4, atol=1e-5)
