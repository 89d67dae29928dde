"""What `export` prints."""

from dataclasses import asdict
from typing import Any

from rich.markup import escape

from compressor.cli.tables import console, print_json, print_table
from compressor.words import human_bytes


def show_export(summary: Any, as_json: bool) -> None:
    """What was written, which MoE layers are no single node and why, and how well it agrees with the stock model."""
    if as_json:
        content = asdict(summary)
        print_json({**content, "folder": str(summary.folder), "fallen_back": len(summary.fallen_back)})
        return
    checked, cost = summary.verification, summary.rounding
    rows = [
        ("file", f"{human_bytes(summary.nbytes)}{', weights in a file of their own' if summary.external else ''}"),
        ("nodes", str(summary.nodes)),
        ("MoE layers as one node", f"{len(summary.routes) - len(summary.fallen_back)} of {len(summary.routes)}"),
        ("largest logit difference", f"{checked.largest_difference:.1e} (allowed {checked.tolerance:.1e})"),
        ("compared with", checked.reference),
        ("greedy tokens", f"{checked.tokens_equal} of {checked.tokens_compared} the same"),
    ]
    if checked.ties:
        rows.append(("near ties of routers", f"{checked.ties} of {checked.tokens} tokens got another expert"))
    if cost is not None:
        rows.append(
            (
                "cost of rounding",
                f"logits differ by up to {cost.largest_difference:.2g} of {cost.largest_logit:.2g}, "
                f"{cost.same_choice:.1%} of likeliest tokens the same",
            )
        )
    print_table(escape(f"{summary.model} as ONNX"), ("what", "measured"), [(name, escape(text)) for name, text in rows])
    for route in summary.fallen_back:
        console().print(escape(f"{route.layer}: {route.route}, since {route.reason}"))
    console().print(escape(f"Written to {summary.folder}"))
