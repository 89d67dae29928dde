"""Headers and indexes: what is read of a sound checkpoint, and one clear refusal for each way to damage one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compressor.checkpoint.reader import DTYPE_BITS, TORCH_DTYPES, Checkpoint, refuse_nan, tensor_bytes
from compressor.errors import CompressionError
from tests.support import small

NAME = "b.weight"
TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), NAME: torch.ones(4, dtype=torch.bfloat16)}


def write(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_sharded(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    places = {name: f"part-{number}.safetensors" for number, name in enumerate(TENSORS)}
    for name, file in places.items():
        save_file({name: TENSORS[name]}, folder / file)
    small.index_path(folder).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.mark.parametrize("layout", [write, write_sharded])
def test_reads_what_the_safetensors_library_reads(layout: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint = Checkpoint(layout(tmp_path / "model"))
    assert set(checkpoint.tensors) == {*TENSORS}
    for name, info in checkpoint.tensors.items():
        expected = load_file(checkpoint.path(name))[name]
        assert torch.equal(checkpoint.read(name), expected)
        assert (info.shape, info.nbytes) == (tuple(expected.shape), expected.numel() * expected.itemsize)
        assert checkpoint.path(name).read_bytes()[info.begin : info.end] == expected.view(torch.uint8).numpy().tobytes()


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return lambda folder: small.edit_header(folder / "model.safetensors", change)


def raw(change: Callable[[bytes], bytes], name: str = "model.safetensors") -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def config(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "config.json").write_text(text)


def renamed(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


# of headers themselves, whatever safetensors checks: `tests.compressor.test_damaged_files` makes many more
BROKEN = r"model.safetensors is truncated or no safetensors file \(.*\); download it again"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "is not a folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config no JSON": (config("{"), "config.json is not valid JSON"),
    "quantization as text": (config('{"quantization_config": "fp8"}'), "quantization_config .* should be an object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors"),
    "pickle only": (renamed("pytorch_model.bin"), "only as pickle files.*convert them to safetensors"),
    "stray name": (renamed("weights.safetensors"), "has weights.safetensors but neither"),
    "dangling link": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors").symlink_to(f / "gone")),
        "neither model.safetensors",
    ),
    "empty file": (raw(lambda whole: b""), BROKEN),
    "cut in the header": (raw(lambda whole: whole[:50]), BROKEN),
    "cut by a byte": (raw(lambda whole: whole[:-1]), "is truncated .* file not fully covered"),
    "bytes too many": (raw(lambda whole: whole + b"more"), "is truncated .* file not fully covered"),
    "header no JSON": (raw(lambda whole: (8).to_bytes(8, "little") + b"not JSON" + bytes(32)), BROKEN),
    "dtype unknown": (header(lambda h: h[NAME].update(dtype="Q4_K")), "unknown variant `Q4_K`"),
    "a gap": (header(lambda h: h.pop("a.weight")), "invalid offset for tensor `b.weight`"),
    "shape too large": (header(lambda h: h[NAME].update(shape=[5])), BROKEN),
    "entry incomplete": (header(lambda h: h[NAME].pop("dtype")), BROKEN),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    folder = write(tmp_path / "model")
    damage(folder)
    with pytest.raises(CompressionError, match=message):
        Checkpoint(folder)


def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return lambda folder: small.edit_json(small.index_path(folder), change)


def place(file: str, name: str = NAME) -> Callable[[Path], Any]:
    return index(lambda content: content["weight_map"].update({name: file}))


INDEX_DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no JSON": (lambda f: small.index_path(f).write_text("{"), "index.json is not valid JSON"),
    "a list": (lambda f: small.index_path(f).write_text("[]"), "should hold a JSON object"),
    "no map": (index(lambda c: c.pop("weight_map")), "has no weight_map"),
    "map a list": (index(lambda c: c.update(weight_map=["x"])), "has no weight_map"),
    "parent folder": (place("../part-1.safetensors"), "outside the folder"),
    "absolute path": (place("/etc/passwd"), "outside the folder"),
    "below": (place("sub/part-1.safetensors"), "outside the folder"),
    "hidden": (place(".part-1.safetensors"), "outside the folder or hidden"),
    "no such shard": (place("part-9.safetensors"), "missing from"),
    "a NUL byte": (place("a\0b"), "missing from"),
    "shard deleted": (lambda f: (f / "part-1.safetensors").unlink(), "names the shard 'part-1.safetensors', which is"),
    "tensor not there": (place("part-0.safetensors", "c.weight"), "promises tensor 'c.weight' in 'part-0.safetensors'"),
    "no safetensors": (place("config.json"), "config.json is truncated"),
    "shard truncated": (raw(lambda whole: whole[:-3], "part-1.safetensors"), "part-1.safetensors is truncated"),
}


@pytest.mark.parametrize("name", INDEX_DAMAGE)
def test_damaged_index_is_refused(name: str, tmp_path: Path) -> None:
    damage, message = INDEX_DAMAGE[name]
    folder = write_sharded(tmp_path / "model")
    damage(folder)
    with pytest.raises(CompressionError, match=message):
        Checkpoint(folder)


def test_stamp_changes_with_the_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    before = Checkpoint(folder).stamp()
    assert Checkpoint(folder).stamp() == before
    small.edit_tensors(folder, lambda tensors: tensors["a.weight"].add_(1))
    assert Checkpoint(folder).stamp() != before


@given(st.sampled_from(sorted(TORCH_DTYPES)), st.lists(st.integers(0, 5), max_size=3))
def test_bytes_of_a_tensor(dtype: str, shape: list[int]) -> None:
    tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    assert tensor_bytes(dtype, tuple(shape)) == tensor.numel() * tensor.itemsize
    assert DTYPE_BITS[dtype] == 8 * tensor.itemsize


FLOATS = [dtype for dtype in TORCH_DTYPES.values() if dtype.is_floating_point]


def holds_nan(tensor: torch.Tensor) -> bool:
    try:
        refuse_nan("x", "part.safetensors", tensor)
    except CompressionError as error:
        return str(error).startswith("tensor 'x' in part.safetensors holds NaN")
    return False


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_bit_pattern_is_told_from_nan(dtype: torch.dtype) -> None:
    if dtype.itemsize == 1:
        for value in torch.arange(256).to(torch.uint8).view(dtype):
            assert holds_nan(value[None]) == bool(value.float().isnan())
    else:
        assert not holds_nan(torch.tensor([1.0, torch.inf, -torch.inf, 0.0]).to(dtype))
        for place in range(3):
            values = torch.ones(3, dtype=dtype)
            values[place] = torch.nan
            assert holds_nan(values)
    assert not holds_nan(torch.empty(0, dtype=dtype)) and not holds_nan(torch.tensor([1, 2]))
