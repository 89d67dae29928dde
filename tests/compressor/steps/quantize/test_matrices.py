"""Which matrices are quantised, and what servers are told to leave as it is."""

from pathlib import Path

import pytest

from compressor.checkpoint.source import locate
from compressor.model.opened import open_model
from compressor.steps.quantize.matrices import ALL, EXPERTS, find_matrices
from tests.support import small, zoo


@pytest.mark.parametrize("targets", [EXPERTS, ALL])
@pytest.mark.parametrize("name", zoo.sweep(zoo.FAMILIES))
def test_every_stored_matrix_is_quantised_or_ignored(name: str, targets: str, tmp_path: Path) -> None:
    """Servers take a matrix for quantised otherwise, routers too, which some of them build as linear layers."""
    model = open_model(locate(str(small.save(tmp_path / "model", name))), device="cpu")
    found = find_matrices(model, targets)
    matrices = {
        tensor.removesuffix(".weight")
        for tensor, info in model.checkpoint.tensors.items()
        if len(info.shape) == 2 and tensor.endswith(".weight") and tensor not in found.replaced
    }
    rest = matrices - set(found.ignored)
    assert [module for module in rest if "emb" not in module and "query_" not in module] == []  # lookup tables
    assert not {matrix.module for matrix in found.every} & set(found.ignored)
