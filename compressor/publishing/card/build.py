"""The model card of a compressed checkpoint, made of what was measured or recorded and of nothing else."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from compressor.drawing.palette import png_bytes
from compressor.errors import CompressionError, without_tokens
from compressor.gates.verdict import GateResult
from compressor.publishing.card.command import rebuilt
from compressor.publishing.card.facts import read_facts
from compressor.publishing.card.layers import layer_details
from compressor.publishing.card.limits import limits
from compressor.publishing.card.metadata import base_metadata, is_hub_id, metadata
from compressor.publishing.card.pictures import gate_figure, gate_text, grid_figure, grid_text
from compressor.publishing.card.sections import comparison, introduction, loading, making, picture
from compressor.report import drawing, figures
from compressor.report.data import report_data
from compressor.report.store import kept_measures
from compressor.run_record import read_record
from compressor.words import shown, without_paths

GRID, GATE = OWN = ("images/experts.png", "images/gate.png")
Pictures = Mapping[str, tuple[bytes, str]]  # PNG and alternative text, by path in the repository
NO_PICTURES: Pictures = MappingProxyType({})
MEASURED = (figures.SIMILARITY, figures.VISITS, figures.ERRORS)  # figures of the last report that a card shows


@dataclass(frozen=True, slots=True)
class Card:
    """README.md with its metadata, and the pictures that it shows."""

    text: str
    pictures: Mapping[str, bytes]  # PNG by path in the repository


def card_text(
    folder: Path,
    repo_id: str,
    gate: GateResult | None = None,
    *,
    command: str | None = None,
    base: Path | None = None,
    pictures: Pictures = NO_PICTURES,
) -> Card:
    """The card of the checkpoint in `folder` as the repository `repo_id`; raises `CompressionError` if it cannot be.

    `gate` is by default the result beside the weights, if it is about them. `command` is the one that was run, `base`
    the folder of a local base, whose card gives the licence, and `pictures` are further ones with alternative texts.
    """
    _check_names(repo_id, pictures)
    facts = read_facts(folder, gate)
    drawn = {GRID: (png_bytes(grid_figure(facts.plan)), grid_text(facts.plan))}
    if facts.gate is not None and facts.gate.tasks:
        drawn[GATE] = (png_bytes(gate_figure(facts.gate)), gate_text(facts.gate))
    inherited = base_metadata(facts.plan, base)
    header = metadata(facts, repo_id, inherited)
    name = repo_id.rpartition("/")[2]
    again = rebuilt(facts.plan, name)
    lines = [
        "---", header.to_yaml(), "---", "",
        f"# {shown(name)}", "",
        *introduction(facts),
        *comparison(facts),
        *(picture(GATE, drawn[GATE][1]) if GATE in drawn else []),
        *making(facts, None if command is None else without_paths(command), again),
        "## Experts", "",
        *picture(GRID, drawn[GRID][1]),
        *layer_details(facts.plan, None if again is None or command is not None else again.protected),
        *(line for path, (_, words) in pictures.items() for line in picture(path, words)),
        *loading(facts, repo_id),
        *limits(facts, header.get("license") is not None),
    ]  # fmt: skip
    text = without_tokens("\n".join(lines).rstrip() + "\n")
    return Card(text, {path: content for path, (content, _) in {**drawn, **pictures}.items()})


def _check_names(repo_id: str, paths: Iterable[str]) -> None:
    if not is_hub_id(repo_id):
        raise CompressionError(f"{repo_id!r} is no name of a repository on the Hub; write it as owner/name")
    for path in paths:
        if not path.endswith(".png") or path.startswith("/") or ".." in PurePosixPath(path).parts or path in OWN:
            raise CompressionError(
                f"the card cannot take a picture at {path!r}; give it a path of its own that ends in .png, relative to "
                "the repository"
            )


def known_here(folder: Path) -> dict[str, Any]:
    """What only this machine knows of an output, as arguments of `card_text`: command, local base, measured figures."""
    record, measured = read_record(folder), kept_measures(folder)
    base = Path(record.source) if record is not None and record.revision is None else None
    drawn = figures.pictures(report_data(folder, measured), MEASURED) if measured is not None else ()
    return {
        "command": shlex.join(record.command) if record is not None and record.command else None,
        "base": base if base is not None and base.is_dir() else None,
        "pictures": {f"images/{picture.name}.png": (drawing.png(picture), picture.alt) for picture in drawn},
    }
