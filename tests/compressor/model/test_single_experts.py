"""Experts packed one by one, of families whose stock checkpoints hold them fused."""

from pathlib import Path

import pytest
import torch

from compressor.checkpoint.source import locate
from compressor.model.opened import open_model
from tests.support import zoo
from tests.support.per_expert_checkpoints import FUSED, save_packed


def check(folder: Path, model: torch.nn.Module) -> None:
    partial = open_model(locate(str(folder)), "float32", "cpu").partial
    partial.load(partial.empty)
    for key, value in partial.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


@pytest.mark.parametrize("name", zoo.sweep(FUSED))
def test_every_parameter_is_what_the_packed_matrices_mean(name: str, tmp_path: Path) -> None:
    check(tmp_path, save_packed(name, tmp_path))


def test_biases_may_be_stored_one_by_one(tmp_path: Path) -> None:
    check(tmp_path, save_packed("gpt_oss", tmp_path, single_biases=True))
