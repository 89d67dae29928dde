"""The model card of a compressed checkpoint, made of what was measured or recorded and of nothing else."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor.document.blocks import Figure, Heading
from compressor.document.markdown import markdown
from compressor.drawing.picture import png
from compressor.errors import CompressionError, without_tokens
from compressor.gates.verdict import GateResult
from compressor.publishing.card.facts import base_metadata, is_hub_id, metadata, read_facts
from compressor.publishing.card.layers import layer_details
from compressor.publishing.card.recipe import again
from compressor.publishing.card.sections import comparison, introduction, limits, loading, making
from compressor.report.data import Measured, report_data
from compressor.report.figures import figures
from compressor.report.measuring_run import kept_measures
from compressor.run_record import read_record
from compressor.words import one_line, without_paths

MEASURED = ("similarity", "visits", "errors")  # figures of the last report that a card shows


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
    measured: Measured | None = None,
) -> Card:
    """The card of the checkpoint in `folder` as the repository `repo_id`; raises `CompressionError` if it cannot be.

    `gate` is by default the result beside the weights, if it is about them. `command` is the one that was run, `base`
    the folder of a local base, whose card gives the licence, and `measured` what a report found, to be shown too.
    """
    if not is_hub_id(repo_id):
        raise CompressionError(f"{repo_id!r} is no name of a repository on the Hub; write it as owner/name")
    facts = read_facts(folder, gate)
    data = replace(report_data(folder, measured), gate=facts.gate)
    drawn = {
        figure.name: figure
        for figure in figures(data, ("experts", "gate", "distillation", *(MEASURED if measured else ())))
    }
    images = {name: f"images/{name}.png" for name in drawn}
    header = metadata(facts, repo_id, base_metadata(facts.plan.source, base))
    name = repo_id.rpartition("/")[2]
    blocks = (
        Heading(one_line(name), 1),
        *introduction(facts),
        *comparison(facts),
        *_pictures(drawn, "gate", "distillation"),
        *making(facts, None if command is None else without_paths(command), again(facts.plan, name)),
        Heading("Experts"),
        *_pictures(drawn, "experts"),
        *layer_details(facts.stage),
        *_pictures(drawn, *MEASURED),
        *loading(facts, repo_id),
        *limits(facts, header.get("license") is not None),
    )
    text = without_tokens(f"---\n{header.to_yaml()}\n---\n\n{markdown(blocks, images)}")
    return Card(text, {images[name]: png(figure.title, figure.drawings) for name, figure in drawn.items()})


def _pictures(drawn: Mapping[str, Figure], *names: str) -> list[Figure]:
    return [drawn[name] for name in names if name in drawn]


def known_here(folder: Path) -> dict[str, Any]:
    """What only this machine knows of an output, as arguments of `card_text`: command, local base, measures."""
    record, measured = read_record(folder), kept_measures(folder)
    base = Path(record.source) if record is not None and record.revision is None else None
    return {
        "command": shlex.join(record.command) if record is not None and record.command else None,
        "base": base if base is not None and base.is_dir() else None,
        "measured": measured,
    }
