"""An export that is published: checked as it lies, and how its model card says to load it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compressor.document.blocks import Block, Listing, Text
from compressor.errors import CompressionError, reason_of
from compressor.extras import require
from compressor.files import GRAPH
from compressor.records import read_object
from exporters.onnx.options import RECORD

AGAIN = "export the checkpoint again with moe-compress export"


def check_export(folder: Path) -> dict[str, int]:
    """Check an ONNX export against its record, and that its weights are all there.

    Returns its files with the bytes in them that are not weights: all of the graph itself, which
    has names and notes."""
    path = folder / GRAPH
    for name in (GRAPH, RECORD):
        if not (folder / name).is_file():
            raise CompressionError(
                f"{folder} has no {name}, so it is no verified ONNX export; {AGAIN}"
            )
    record = read_object(folder / RECORD)
    verification = record.get("verification")
    if not verification or verification["largest_difference"] > verification["tolerance"]:
        what = f"{folder / RECORD} does not say that the graph agrees with the stock model"
        raise CompressionError(f"{what}; {AGAIN}")
    require("onnx")
    import onnx

    ends = dict[str, int]()  # of the files beside the graph, where their last tensors end
    try:
        model = onnx.load(str(path), load_external_data=False)
        for tensor in _tensors(model.graph):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if entries:
                name = entries.get("location", "")
                end = int(entries.get("offset", 0)) + int(entries.get("length", 0))
                ends[name] = max(ends.get(name, 0), end)
        for name, end in ends.items():
            if not name or Path(name).name != name or name.startswith("."):
                where = f"{path} keeps weights in {name!r}"
                raise CompressionError(f"{where}, outside its folder or hidden; it is refused")
            size = (folder / name).stat().st_size if (folder / name).is_file() else None
            if size != end:
                there = "is missing" if size is None else f"has {size} bytes"
                raise CompressionError(
                    f"{folder / name} {there}, {GRAPH} needs {end} bytes of weights there; {AGAIN}"
                )
        onnx.checker.check_model(str(path))
    except CompressionError:
        raise
    except Exception as error:  # a class for each kind of fault
        raise CompressionError(
            f"{path} is no sound ONNX graph ({reason_of(error, 160)}); {AGAIN}"
        ) from error
    for kind, values in (("inputs", model.graph.input), ("outputs", model.graph.output)):
        if [value.name for value in values] != record.get(kind):
            raise CompressionError(f"{path} does not have the {kind} that {RECORD} names; {AGAIN}")
    return {GRAPH: path.stat().st_size, **dict.fromkeys(ends, 0)}


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)


def loading_blocks(place: str, repo_id: str) -> list[Block]:
    """Return how to load the graph in `place` of a repository, '' for its root."""
    folder = f"model/{place}" if place else "model"
    shell = (
        f"hf download {repo_id} --local-dir model\n"
        f'moe-compress generate {folder} "Once upon a time"'
    )
    session = f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{folder}/{GRAPH}")'
    return [
        Text("In ONNX Runtime; or from the terminal, once the repository is downloaded:"),
        Listing(shell, "bash"),
        Listing(session, "python"),
    ]
