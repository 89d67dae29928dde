"""The model card of a compressed checkpoint, made of what was measured or recorded and of nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from compressor.errors import CompressionError, without_tokens
from compressor.gates.verdict import GateResult
from compressor.publishing.card.command import rebuilt
from compressor.publishing.card.facts import Facts, read_facts
from compressor.publishing.card.layers import layer_details
from compressor.publishing.card.limits import limits
from compressor.publishing.card.metadata import base_metadata, is_hub_id, metadata
from compressor.publishing.card.pictures import gate_figure, gate_text, grid_figure, grid_text, png
from compressor.publishing.card.sections import comparison, introduction, loading, making, picture
from compressor.words import shown, without_paths

GRID, GATE = "images/experts.png", "images/gate.png"
NO_PICTURES: Mapping[str, tuple[bytes, str]] = MappingProxyType({})


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
    pictures: Mapping[str, tuple[bytes, str]] = NO_PICTURES,
) -> Card:
    """The card of the checkpoint in `folder` as the repository `repo_id`; raises `CompressionError` if it cannot be.

    `gate` is by default the result beside the weights, if it is about them. `command` is the one that was run, `base`
    the folder of a local base, whose card gives the licence, and `pictures` are further ones with alternative texts.
    """
    if not is_hub_id(repo_id):
        raise CompressionError(f"{repo_id!r} is no name of a repository on the Hub; write it as owner/name")
    for path in pictures:
        _check_path(path)
    facts = read_facts(folder, gate)
    drawn = _drawn(facts)
    inherited = base_metadata(facts.plan, base)
    header = metadata(facts, repo_id, inherited)
    name = repo_id.rpartition("/")[2]
    again = rebuilt(facts.plan, name)
    lines = [
        "---",
        header.to_yaml(),
        "---",
        "",
        f"# {shown(name)}",
        "",
        *introduction(facts),
        *comparison(facts),
        *(picture(GATE, drawn[GATE][1]) if GATE in drawn else []),
        *making(facts, None if command is None else without_paths(command), again),
        "## Experts",
        "",
        *picture(GRID, drawn[GRID][1]),
        *layer_details(facts.plan, None if again is None or command is not None else again.protected),
        *(line for path, (_, words) in pictures.items() for line in picture(path, words)),
        *loading(facts, repo_id),
        *limits(facts, header.get("license") is not None),
    ]
    text = without_tokens("\n".join(lines).rstrip() + "\n")
    return Card(text, {path: content for path, (content, _) in {**drawn, **pictures}.items()})


def _drawn(facts: Facts) -> dict[str, tuple[bytes, str]]:
    """Our own pictures with their alternative texts."""
    found = {GRID: (png(grid_figure(facts.plan)), grid_text(facts.plan))}
    if facts.gate is not None and facts.gate.tasks:
        found[GATE] = (png(gate_figure(facts.gate)), gate_text(facts.gate))
    return found


def _check_path(path: str) -> None:
    parts = PurePosixPath(path).parts
    if not path.endswith(".png") or path.startswith("/") or ".." in parts or path in (GRID, GATE):
        raise CompressionError(
            f"the card cannot take a picture at {path!r}; give it a path of its own that ends in .png, relative to the "
            "repository"
        )
