"""A routing attribution as files: all numbers as JSON, hubs.json to protect, a text, a graph and pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.attribution.document import whole_blocks
from compressor.attribution.figures import Attribution
from compressor.attribution.graph_files import NAMES as GRAPH
from compressor.attribution.graph_files import graph_content, graph_figure, measured_graph, write_graph
from compressor.attribution.hubs import Hub, SuperExpert
from compressor.attribution.pictures import NAMES as PICTURES
from compressor.attribution.pictures import pictures
from compressor.attribution.summary import full_content, rounded
from compressor.document.markdown import markdown
from compressor.drawing.picture import png
from compressor.files import whole_folder

NAMES = ("attribution.json", "attribution.md", "hubs.json", *(f"{name}.png" for name in PICTURES), *GRAPH)


def _one_line_each(content: Mapping[str, Any]) -> str:
    """JSON with a line for each item of a list: tens of thousands of numbers would be as many lines otherwise."""
    parts = []
    for name, value in content.items():
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if isinstance(value, list) and value:
            items = ",\n    ".join(json.dumps(item, ensure_ascii=False, allow_nan=False) for item in value)
            text = f"[\n    {items}\n  ]"
        parts.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_attribution(
    attribution: Attribution,
    hubs: Sequence[Hub],
    supers: Sequence[SuperExpert],
    folder: Path,
    overwrite: bool,
    threshold: float,
    top: int,
) -> list[Path]:
    """Write JSON, Markdown, graph and pictures into a new folder, all of them or, when anything fails, nothing.

    With `overwrite` an earlier attribution is replaced once the new one is complete, and stays when anything fails.
    """
    with whole_folder(folder, NAMES, overwrite) as made:
        graph = measured_graph(attribution)
        content = {**full_content(attribution, hubs, supers, threshold), "graph": rounded(graph_content(graph))}
        (made / NAMES[0]).write_text(_one_line_each(content), encoding="utf-8")
        text = markdown(whole_blocks(attribution, hubs, supers, threshold, top, graph))
        (made / NAMES[1]).write_text(text, encoding="utf-8")
        found = json.dumps(rounded(tuple(hubs)), indent=2, ensure_ascii=False, allow_nan=False)
        (made / NAMES[2]).write_text(found + "\n", encoding="utf-8")
        for figure in (*pictures(attribution, hubs, top), graph_figure(graph)):
            (made / f"{figure.name}.png").write_bytes(png(figure.title, figure.drawings))
        write_graph(graph, made)
    return [folder / name for name in NAMES]
