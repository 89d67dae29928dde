"""The command `attribute`, which is announced by an entry point and loads torch only when it
runs."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import compressor
from compressor.cli.options import Computing, Model, Seed, Unweighted, flag, spread
from compressor.cli.terminal import on_ranks, print_report, reporting, written_line
from compressor.distributed import ranks
from compressor.extras import require


@spread
@on_ranks
def attribute(
    model: Model,
    text: Unweighted,
    running: Computing,
    output: Annotated[
        Path | None, flag("New folder for hubs.json, attribution.json, pictures and the graph.")
    ] = None,
    top: Annotated[int, flag("Strongest senders to show.", min=1)] = 10,
    threshold: Annotated[
        float, flag("Modified z-score within a layer above which an expert is a hub.", min=0)
    ] = 3.5,
    keys: Annotated[
        int, flag("Sequences on which to split the strongest heads by key token.", min=0)
    ] = 0,
    edges: Annotated[
        Literal["routers", "experts"],
        flag(
            "Targets of the graph's edges: routers, or experts (every later expert's score, too).",
            metavar="routers|experts",
        ),
    ] = "routers",
    edges_kept: Annotated[int, flag("Strongest edges to experts' scores to keep.", min=1)] = 2000,
    without: Annotated[
        str,
        flag(
            "Experts that no router may choose, such as L1E9,L4E14: figures with all experts, and "
            "without them."
        ),
    ] = "",
    seed: Seed = 0,
) -> None:
    """Attribute router scores to earlier components, and find the hub experts; nothing is
    compressed."""
    if output is not None:
        require("matplotlib", "networkx")
    from compressor.attribution.report import (
        NAMES,
        brief_blocks,
        brief_content,
        findings,
        write_attribution,
    )

    with reporting(output, NAMES, running.overwrite, running.as_json) as progress:
        run = partial(
            compressor.attribute,
            model,
            keys=keys,
            top=top,
            edges_kept=edges_kept if edges == "experts" else 0,
            calibration=text,
            seed=seed,
            resident=running.resident,
            **running.reading(progress),
        )
        # which refuses names, so it comes first
        attribution = run(without=without.split(",")) if without else run()
        results = findings(attribution, threshold, top, run() if without else None)
        written = []
        if output is not None and ranks().is_first:
            written = write_attribution(results, output, running.overwrite)
    content = {**brief_content(results), "written": [str(path) for path in written]}
    print_report(running.as_json, content, (*brief_blocks(results), *written_line(written)))
