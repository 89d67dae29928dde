"""A routing attribution as tables on the terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from compressor.attribution.figures import Attribution
from compressor.attribution.hubs import Hub, SuperExpert
from compressor.attribution.report import (
    HUB_COLUMNS,
    KIND_COLUMNS,
    SENDER_COLUMNS,
    exactness,
    hub_cells,
    kind_rows,
    overlap_line,
    sender_rows,
)
from compressor.attribution.summary import brief_content
from compressor.cli.tables import console, print_json, print_table


def show_attribution(
    attribution: Attribution,
    hubs: Sequence[Hub],
    supers: Sequence[SuperExpert],
    top: int,
    as_json: bool,
    written: Sequence[Path] = (),
) -> None:
    """Hubs, the strongest senders, the kinds, and how exact it all is; `written` are the reports' files."""
    if as_json:
        print_json({**brief_content(attribution, hubs, supers), "written": [str(path) for path in written]})
        return
    _show_hubs(attribution, hubs, supers)
    _show_senders(attribution, top)
    print_table("What shapes routing", KIND_COLUMNS, kind_rows(attribution))
    lines = [overlap_line(hubs, supers), exactness(attribution)]
    if written:
        lines.append(f"Written: {', '.join(str(path) for path in written)}")
    for line in lines:
        console().print(line, highlight=False, markup=False, soft_wrap=True)


def _show_hubs(attribution: Attribution, hubs: Sequence[Hub], supers: Sequence[SuperExpert]) -> None:
    if not hubs:
        print("No hubs above the threshold.")
        return
    massive = {(each.module, each.expert) for each in supers}
    rows = [(*hub_cells(hub), "yes" if (hub.module, hub.expert) in massive else "no") for hub in hubs]
    print_table(f"{escape(attribution.model)}: routing hubs", (*HUB_COLUMNS, "super expert"), rows)


def _show_senders(attribution: Attribution, top: int) -> None:
    if rows := sender_rows(attribution, top, escape):
        print_table("Strongest senders", SENDER_COLUMNS, rows)
