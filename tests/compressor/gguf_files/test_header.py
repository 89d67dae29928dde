"""Headers of strangers: whatever is wrong with a file is one sentence, and costs neither time nor memory."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from compressor.errors import CompressionError
from compressor.gguf_files.blocks import inspect_gguf
from compressor.gguf_files.choosing import read_imatrix
from compressor.gguf_files.header import open_gguf, read_header
from tests import gguf_models

HUGE = 2**63 - 1


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
        (b"", "it ends within its first 4 bytes"),
        (b"GGML" + bytes(40), "it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "it has the version 1, known are 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "of little-endian machines"),
        (header(tensors=HUGE), "the number of its tensors is 9,223,372,036,854,775,807, more than"),
        (header(values=HUGE), "the number of its values is 9,223,372,036,854,775,807, more than"),
        (header(HUGE), "the length of a key is"),
        (header("a", kind(8), HUGE), "it ends within the value of 'a'"),
        (header("a", kind(9), kind(4), HUGE), "the length of 'a' is"),
        (header("a", kind(9), kind(10), 2**22), "it ends within the value of 'a'"),
        (header("a", kind(9), kind(8), 2**22), "it ends within the value of 'a'"),
        (header("a", kind(9), kind(9), 1, kind(9)), "has the unknown type 9"),
        (header("a", kind(77)), "has the unknown type 77"),
        (header("a", kind(4), kind(1), "a", kind(4), kind(1), values=2), "the key 'a' comes twice"),
        (header(b"\1" + bytes(7) + b"\xff"), "a key is no UTF-8"),
        (header("general.alignment", kind(4), kind(24)), "its alignment is 24"),
        (header("general.alignment", kind(8), "x"), "its alignment is x"),
        (header("general.alignment", kind(5), struct.pack("<i", -2)), "its alignment is -2"),
        (header("t", kind(5), tensors=1, values=0), "the number of dimensions of tensor 't' is 5, more than 4"),
        (header("t", kind(1), HUGE, kind(0), 0, tensors=1, values=0), "it ends within tensor 't'"),
        (header("t", kind(4), *[HUGE] * 4, kind(0), 0, tensors=1, values=0), "it ends within tensor 't'"),
        (header("t", kind(1), 4, kind(99), 0, tensors=1, values=0), "has the type 99, which .* does not know"),
        (header("t", kind(1), 33, kind(8), 0, tensors=1, values=0), "'t' of Q8_0 cannot have the shape .33."),
        (header("t", kind(1), 0, kind(0), 0, tensors=1, values=0), "cannot have the shape .0."),
        (header("t", kind(1), 1, kind(0), 32, bytes(99), tensors=1, values=0), "does not lie after the one before"),
        (header(*["t", kind(1), 1, kind(0), 0] * 2, bytes(99), tensors=2, values=0), "'t' does not lie after"),
    ],
)  # fmt: skip
def test_a_hostile_header_is_one_sentence(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CompressionError, match=message):
        read_header(path)


def test_no_byte_can_raise_anything_else(tmp_path: Path) -> None:
    """Truncated anywhere and changed anywhere in the header: it reads, or it is refused."""
    model = gguf_models.quantised(tmp_path / "model.gguf")
    whole = model.read_bytes()
    start = read_header(model).tensors[0].begin
    squares, counts = np.ones((8, 32)), np.arange(8)
    old = gguf_models.old_imatrix(tmp_path / "old.dat", {"blk.1.ffn_down_exps.weight": (squares, counts)})
    rng, damaged, refusals = np.random.default_rng(0), tmp_path / "damaged.gguf", 0
    for content, end, read in ((whole, start, inspect_gguf), (old.read_bytes(), 60, read_imatrix)):
        cases = [content[:place] for place in rng.integers(0, len(content), 60)]
        for place in rng.integers(0, end, 250):
            changed = bytearray(content)
            changed[place] = rng.integers(0, 256) if rng.random() < 0.5 else (changed[place] ^ (1 << rng.integers(8)))
            cases.append(bytes(changed))
        for case in cases:
            damaged.write_bytes(case)
            try:
                read(damaged)  # type: ignore[operator]
            except CompressionError:
                refusals += 1
    assert refusals > 200


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
        (lambda paths: _repeat_a_tensor(*paths[:2]), "do not hold the promised tensors"),
    ],
)  # fmt: skip
def test_parts_must_belong_together(spoil: object, message: str, tmp_path: Path) -> None:
    first = gguf_models.quantised(tmp_path / "model.gguf", parts=3)
    paths = [first.with_name(f"model-0000{number}-of-00003.gguf") for number in (1, 2, 3)]
    assert open_gguf(paths[2]) == open_gguf(first)
    spoil(paths)  # type: ignore[operator]
    with pytest.raises(CompressionError, match=message):
        open_gguf(first if first.exists() else tmp_path / "model.gguf")


def _repeat_a_tensor(one: Path, two: Path) -> None:
    """Give a tensor of the second file the name of one of the first."""
    pairs = ((a.name, b.name) for a in read_header(one).tensors for b in read_header(two).tensors)
    name, other = next((a, b) for a, b in pairs if len(a) == len(b))
    two.write_bytes(two.read_bytes().replace(other.encode(), name.encode(), 1))


@pytest.mark.parametrize(
    ("facts", "tensors", "message"),
    [
        ({"expert_count": 0}, {}, "has no routed experts"),
        ({"expert_count": 4096}, {}, "does not begin with the 4096 experts"),
        ({"expert_count": 2**31}, {}, "are more than any model has"),
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
