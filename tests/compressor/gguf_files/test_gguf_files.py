"""GGUF files: headers read as the package gguf reads them, or refused; scores against experts that are run."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize

from compressor.errors import CompressionError
from compressor.gguf_files.blocks import find_blocks, inspect_gguf
from compressor.gguf_files.choosing import COUNTS, ENERGY, imatrix_scores
from compressor.gguf_files.header import open_gguf, read_header
from tests.support import gguf_models


def header(*parts: bytes | int | str, tensors: int = 0, values: int = 1) -> bytes:
    """The start of a file and then parts: whole numbers of 64 bits, strings with their length, bytes as they are."""
    found = b"GGUF" + struct.pack("<IQQ", 3, tensors, values)
    for part in parts:
        if isinstance(part, str):
            part = struct.pack("<Q", len(part.encode())) + part.encode()
        found += struct.pack("<Q", part) if isinstance(part, int) else part
    return found


def kind(number: int) -> bytes:
    return struct.pack("<I", number)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it ends within its header, at 0 bytes"),
        (b"GGML" + bytes(40), "it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "it has the version 1, known are 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "of little-endian machines"),
        (header(2**63 - 1), "it ends within its header"),
        (header("a", kind(9), kind(10), 2**22), "it ends within its header"),
        (header("a", kind(77)), "has the unknown type 77"),
        (header("t", kind(1), 99, kind(0), 0, bytes(99), tensors=1, values=0), "it ends within tensor 't'"),
        (header("t", kind(1), 4, kind(99), 0, tensors=1, values=0), "has the type 99, which .* does not know"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_one_sentence(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CompressionError, match=message):
        read_header(path)


def test_the_header_is_what_the_package_gguf_reads(tmp_path: Path) -> None:
    path = gguf_models.quantised(tmp_path / "model.gguf")
    found, wanted = read_header(path), gguf_models.contents(path)
    raw = path.read_bytes()
    assert {each.name: (each.shape, raw[each.begin : each.begin + each.nbytes]) for each in found.tensors} == {
        name: (shape, content) for name, (shape, _, content) in wanted.items()
    }
    for name, value in gguf_models.metadata(path).items():
        stored = found.values[name]
        assert value == stored.content or stored.kind in (6, 7, 9)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda paths: paths[1].unlink(), "model-00002-of-00003.gguf is missing, one of the 3 parts"),
        (lambda paths: paths[1].write_bytes(paths[2].read_bytes()), "it is part 3 of 3, by its name it is part 2"),
        (lambda paths: paths[0].rename(paths[0].with_name("model.gguf")), "it is part 1 of 3, by its name"),
    ],
)  # fmt: skip
def test_parts_must_belong_together(spoil: object, message: str, tmp_path: Path) -> None:
    first = gguf_models.quantised(tmp_path / "model.gguf", parts=3)
    paths = [first.with_name(f"model-0000{number}-of-00003.gguf") for number in (1, 2, 3)]
    assert open_gguf(paths[2]) == open_gguf(first)
    spoil(paths)  # type: ignore[operator]
    with pytest.raises(CompressionError, match=message):
        open_gguf(first if first.exists() else tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("facts", "tensors", "message"),
    [
        ({"expert_count": 0}, {}, "has no routed experts"),
        ({"expert_count": 4096}, {}, "does not begin with the 4096 experts"),
        ({"expert_used_count": 9}, {}, "fewer than the top-k of 9"),
        ({"expert_group_count": 3}, {}, "do not divide into its 3 routing groups"),
        ({}, {"blk.0.ffn_gate_tid2eid.weight": (8,)}, "belongs to experts in an unknown way"),
        ({}, {"blk.0.ffn_gate.3.weight": (8,)}, "belongs to experts in an unknown way"),
        ({}, {"blk.0.ffn_gate_chexps.weight": (8, 32)}, "belongs to experts in an unknown way"),
        ({}, {"blk.7.ffn_down_exps.weight": (8, 32)}, "blk.7 has experts but no blk.7.ffn_gate_inp.weight"),
    ],
)  # fmt: skip
def test_models_that_nobody_can_cut(
    facts: dict[str, int], tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    shapes = {"blk.0.ffn_gate_inp.weight": (8, 32), "blk.0.ffn_down_exps.weight": (8, 4, 32), **tensors}
    raw = {name: (np.zeros(shape, np.float32), Kind.F32) for name, shape in shapes.items()}
    path = gguf_models.write(tmp_path / "m.gguf", "x", {"expert_count": 8, "expert_used_count": 2, **facts}, raw)
    with pytest.raises(CompressionError, match=message):
        inspect_gguf(str(path))


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
    new = read_header(gguf_models.imatrix(tmp_path / "i.gguf", {NAME: (squares, counts)}))
    energy = imatrix_scores(model, layer, new, ENERGY)
    torch.testing.assert_close(energy, torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=0)
    assert imatrix_scores(model, layer, new, COUNTS).tolist() == counts.tolist()


def test_quantised_weights_count_as_they_are_dequantised(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    down = rng.standard_normal((EXPERTS, HIDDEN, WIDE)).astype(np.float32)
    model = open_gguf(model_of(tmp_path / "m.gguf", down, Kind.Q8_0))
    raw = np.frombuffer(model.tensors[NAME].read(), np.uint8)
    blocks = raw.reshape(EXPERTS, HIDDEN, 2 + 32)  # a scale and 32 signed bytes
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float64)
    weight = scale * blocks[..., 2:].copy().view(np.int8)
    squares = rng.random((EXPERTS, WIDE))
    imatrix = read_header(gguf_models.imatrix(tmp_path / "i.gguf", {NAME: (squares, np.ones(EXPERTS))}))
    wanted = torch.from_numpy(np.einsum("en,ehn->e", squares.astype(np.float32), weight**2))
    energy = imatrix_scores(model, find_blocks(model).layers[0], imatrix, ENERGY)
    torch.testing.assert_close(energy, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_numbers_that_are_no_sums_are_refused(value: float, tmp_path: Path) -> None:
    model = open_gguf(model_of(tmp_path / "m.gguf", np.ones((EXPERTS, HIDDEN, WIDE), np.float32), Kind.F16))
    squares = np.ones((EXPERTS, WIDE))
    squares[2, 3] = value
    imatrix = read_header(gguf_models.imatrix(tmp_path / "i.gguf", {NAME: (squares, np.ones(EXPERTS))}))
    with pytest.raises(CompressionError, match="no sums of squares"):
        imatrix_scores(model, find_blocks(model).layers[0], imatrix, ENERGY)
