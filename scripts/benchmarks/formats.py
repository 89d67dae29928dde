"""Number formats by layer beside one for all, alone and with drops, and predicted beside measured KL."""

import datetime
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from scripts.benchmarks import frame

NAME = "formats"
BITS = (2.5, 3.0, 3.5, 4.5)  # of a quantised weight, scales included
ALL = "for all"  # which names of choices with one format end in


def measure(given: Any, folder: Path) -> dict[str, Any]:
    """Choose formats for each number of bits and draw of the text, and drops with them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = list[dict[str, Any]]()
    for seed in given.seeds:
        text = ["--calibration", given.text, "--samples", str(given.samples), "--sequence-length", str(given.length)]
        text += ["--seed", str(seed)]
        for bits in BITS:
            output = folder / f"{bits}-{seed}.json"
            if not output.exists():
                flags = ["--quantize.bits", str(bits), "--quantize.targets", "all"]
                frame.run_child([*frame.COMMAND, "plan", given.model, "-o", str(output), *flags, *text])
            choices = json.loads(output.read_text(encoding="utf-8"))["steps"][-1]["plan"]["choices"]
            rows += [{"seed": seed, "bits": bits, **choice} for choice in choices]
        for bits in filter(None, given.drops):
            output = folder / f"drops-{bits}-{seed}"
            if not (output / "comparison.json").exists():
                flags = ["--bits", str(bits), "--correct", "ridge", "--heldout", given.heldout]
                frame.run_child([*frame.COMMAND, "compare", given.model, "-o", str(output), *flags, *text])
            content = json.loads((output / "comparison.json").read_text(encoding="utf-8"))
            for row in content["rows"]:
                if row["predicted"] is not None:
                    kept = {"share": row["share"], "name": row["scheme"], "bytes": row["bytes"]}
                    kls = {"predicted_kl": row["predicted"], "kl": row["kl"]}
                    rows.append({"seed": seed, "bits": bits, **kept, **kls})
    command = f"moe-compress plan ./{given.name} -o plan.json --quantize.bits {BITS[2]} --quantize.targets all"
    command += f" --calibration {Path(given.text).name} --samples {given.samples} --sequence-length {given.length}"
    return {"command": command, "date": datetime.date.today().isoformat(), "seeds": given.seeds, "rows": rows}


def chosen(rows: Sequence[Mapping[str, Any]]) -> dict[int, tuple[float, float, float]]:
    """Return of each draw the KL of one format for all, and of the choice measured and predicted."""
    found = {}
    for seed in sorted({row["seed"] for row in rows}):
        own = [row for row in rows if row["seed"] == seed]
        singles = [row["kl"] for row in own if row["name"].endswith(ALL)]
        best = min(own, key=lambda row: float(row["kl"]))
        if singles:
            found[seed] = min(singles), best["kl"], best["predicted_kl"]
    return found


def formats_table(subjects: Sequence[Any]) -> str:
    """Return a row for each number of bits: KL of one format for all and by layer, means over draws; and, over all
    rows, how near the predictions are."""
    from scipy.stats import spearmanr

    lines = defaultdict[float, list[str]](list)
    columns = ["bits of a weight"]
    ratios = list[float]()
    for subject in subjects:
        columns += [f"{subject.title}, one format", "by layer", "ratio", "predicted"]
        for bits in BITS:
            of_bits = subject.rows(NAME, bits=bits)
            of_draws = chosen([row for row in of_bits if "share" not in row]).values()
            one, by_layer, predicted = (fmean(values) for values in zip(*of_draws, strict=True))
            ratios += [each[1] / each[0] for each in of_draws]
            lines[bits] += [f"{one:.4f}", f"{by_layer:.4f}", f"{by_layer / one:.2f}", f"{predicted:.4f}"]
    rows = [row for subject in subjects for row in subject.experiments[NAME]["rows"] if row["kl"] > 0]
    pairs = [(row["predicted_kl"], row["kl"]) for row in rows]
    rank = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    off = median(abs(predicted / kl - 1) for predicted, kl in pairs)
    drops = sum("share" in row and row["share"] < 1 for row in rows)
    said = (
        f"Ratio of KLs over all models, draws and bits: mean {fmean(ratios):.2f}, largest {max(ratios):.2f}. Predicted"
        f" against measured KL of {len(rows)} models, {drops} of them pruned, too: rank correlation {rank:.3f}, median"
        f" error {off:.0%}."
    )
    return frame.table(columns, [[f"{bits:g}", *lines[bits]] for bits in BITS]) + f"\n\n{said}"
