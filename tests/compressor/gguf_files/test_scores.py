"""Scores from an imatrix against the energies of experts that are run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize

from compressor.errors import CompressionError
from compressor.gguf_files.blocks import find_blocks
from compressor.gguf_files.choosing import count_scores, energy_scores, read_imatrix
from compressor.gguf_files.header import open_gguf
from tests.support import gguf_models

EXPERTS, WIDE, HIDDEN = 4, 32, 64
NAME = "blk.0.ffn_down_exps.weight"


def model_of(path: Path, down: np.ndarray, kind: Kind) -> Path:  # type: ignore[type-arg]
    router = np.zeros((EXPERTS, HIDDEN), np.float32)
    tensors = {"blk.0.ffn_gate_inp.weight": (router, Kind.F32), NAME: (quantize(down, kind), kind)}
    return gguf_models.write(path, "x", {"expert_count": EXPERTS, "expert_used_count": 2}, tensors)


def test_the_energy_is_that_of_the_outputs_where_columns_are_orthogonal(tmp_path: Path) -> None:
    """Then ||W h||^2 has no products of different neurons, and running the experts gives the score itself."""
    rng = np.random.default_rng(0)
    down = np.stack([np.linalg.qr(rng.standard_normal((HIDDEN, WIDE)))[0] for _ in range(EXPERTS)])
    down = (down * rng.uniform(0.5, 2, (EXPERTS, 1, WIDE))).astype(np.float32)
    entered = [rng.standard_normal((rows, WIDE)).astype(np.float32) for rows in (5, 0, 9, 3)]
    squares = np.stack([(rows**2).sum(0) for rows in entered])
    counts = np.array([len(rows) for rows in entered])
    wanted = [float(((rows @ weight.T) ** 2).sum()) for rows, weight in zip(entered, down, strict=True)]
    model = open_gguf(model_of(tmp_path / "m.gguf", down, Kind.F32))
    layer = find_blocks(model).layers[0]
    new = read_imatrix(gguf_models.imatrix(tmp_path / "i.gguf", {NAME: (squares, counts)}))
    torch.testing.assert_close(energy_scores(model, layer, new), torch.tensor(wanted, dtype=torch.float64), rtol=1e-5,
                               atol=0)  # fmt: skip
    assert count_scores(model, layer, new).tolist() == counts.tolist()


def test_quantised_weights_count_as_they_are_dequantised(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    down = rng.standard_normal((EXPERTS, HIDDEN, WIDE)).astype(np.float32)
    model = open_gguf(model_of(tmp_path / "m.gguf", down, Kind.Q8_0))
    raw = np.frombuffer(model.tensors[NAME].read(), np.uint8)
    blocks = raw.reshape(EXPERTS, HIDDEN, 2 + 32)  # a scale and 32 signed bytes
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float64)
    weight = scale * blocks[..., 2:].copy().view(np.int8)
    squares = rng.random((EXPERTS, WIDE))
    imatrix = read_imatrix(gguf_models.imatrix(tmp_path / "i.gguf", {NAME: (squares, np.ones(EXPERTS))}))
    wanted = torch.from_numpy(np.einsum("en,ehn->e", squares.astype(np.float32), weight**2))
    torch.testing.assert_close(energy_scores(model, find_blocks(model).layers[0], imatrix), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_numbers_that_are_no_sums_are_refused(value: float, tmp_path: Path) -> None:
    model = open_gguf(model_of(tmp_path / "m.gguf", np.ones((EXPERTS, HIDDEN, WIDE), np.float32), Kind.F16))
    squares = np.ones((EXPERTS, WIDE))
    squares[2, 3] = value
    imatrix = read_imatrix(gguf_models.imatrix(tmp_path / "i.gguf", {NAME: (squares, np.ones(EXPERTS))}))
    with pytest.raises(CompressionError, match="no sums of squares"):
        energy_scores(model, find_blocks(model).layers[0], imatrix)
