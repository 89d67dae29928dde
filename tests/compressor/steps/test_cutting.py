"""Finished layers on disk: whole or not there."""

from pathlib import Path

import torch

from compressor.model.architecture import discover
from compressor.steps.cutting import CutFiles
from tests.support import zoo
from tests.support.sequential_runs import merges


def test_a_layer_comes_back_with_its_plan(tmp_path: Path) -> None:
    architecture = discover(zoo.configure("deepseek_v3"))
    plans, files = merges(architecture), CutFiles(tmp_path / "work" / "cut")
    first, second = architecture.layers
    assert files.plan(first) is None and files.tensors(first) == {}
    tensors = {
        "a": torch.randn(3, 4).bfloat16(),
        "b": torch.arange(6).view(2, 3).T,  # not contiguous
        "c": torch.nn.Parameter(torch.randn(2)),
    }
    files.save(plans[first.name], first, tensors)
    assert files.plan(first) == plans[first.name]
    assert files.plan(second) is None
    found = files.tensors(first)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in tensors.items())


def damaged(path: Path) -> list[bytes]:
    """A file's content cut short at many lengths, and replaced by others."""
    whole = path.read_bytes()
    cut = [whole[:length] for length in (0, 1, 7, 8, 9, 50, len(whole) // 2, len(whole) - 1)]
    return [*cut, bytes(len(whole)), b"garbage " * 40, whole + b"more"]


def test_a_file_that_cannot_be_read_does_not_count(tmp_path: Path) -> None:
    architecture = discover(zoo.configure("mixtral"))
    plans, files, layer = merges(architecture), CutFiles(tmp_path / "cut"), architecture.layers[0]
    files.save(plans[layer.name], layer, {"a": torch.ones(3)})
    (path,) = files.folder.iterdir()
    for content in damaged(path):
        path.write_bytes(content)
        assert files.plan(layer) is None and files.tensors(layer) == {}, content
    files.save(plans[layer.name], layer, {"a": torch.zeros(3)})
    assert files.plan(layer) == plans[layer.name] and torch.equal(files.tensors(layer)["a"], torch.zeros(3))
