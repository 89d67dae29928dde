"""Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs (ICLR 2026).

    python recipes/attribution.py figures            # the demo model, offline, on a CPU, in a minute
    python recipes/attribution.py figures --paper    # OLMoE and C4 from the Hub: minutes on a GPU, an hour on a CPU
    python recipes/attribution.py figures org/model --text texts.jsonl

figures: OUT/influence.png (variance by component, sending layer and receiving router), scores.png (APS and ANS),
experts.png (strongest experts and heads), causal.png (AARV over variance) and graph.png (who steers whom).
zeroing: AARV on every later router, of one expert (--experts L1E9, by default the strongest) and over its layer's others.
blocking: two experts (--experts L1E9,L4E14, by default the strongest of different layers, hubs first) blocked alone
and together; experts.png in OUT/without-* draws the strongest others, with all experts and without the blocked ones.
ioi: heads on indirect object identification (Wang et al. 2023, arXiv:2211.00593): "When Mary and John went to the
store, John gave a drink to" -> Mary. The roles of keys are IO (Mary), S1 and S2 (the first and second John), END (the
last token), start (the first token), and other words. A head's score is the variance of its sub-scores over the
experts, summed over the later routers; by role, it is that of the last query alone. The demo is no model of language.
"""

import json
import random
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from running import DEMO, moe_compress, parser

from compressor.attribution.measure import attribute
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.model.opened import open_model
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Silent

NAMES = ("Mary", "John", "Tom", "Anna", "James", "Sarah", "Paul", "Kate", "Mark", "Alice")
PLACES = ("store", "park", "school", "office")
THINGS = ("drink", "book", "ring", "letter")
ROLES = ("IO", "S1", "S2", "END", "start", "other")


def label(sender: dict[str, Any]) -> str:
    return f"L{sender['layer']}E{sender['number']}"


def experts_of(folder: Path) -> list[dict[str, Any]]:
    """Return the experts that an attribution has measured, those of most influence first."""
    content = json.loads((folder / "attribution.json").read_text(encoding="utf-8"))
    experts = [sender for sender in content["senders"] if sender["kind"] == "expert"]
    return sorted(experts, key=lambda sender: -sender["total_influence"])


def zeroing(folder: Path, chosen_label: str | None) -> None:
    """Print the AARV of one expert and of its layer's others on every later router."""
    experts = experts_of(folder)
    named = [sender for sender in experts if label(sender) == chosen_label]
    strongest = max(experts, key=lambda sender: sender["total_rank_change"])
    (chosen,) = named or [strongest]
    others = [sender for sender in experts if sender["module"] == chosen["module"]]
    others.remove(chosen)
    receivers = json.loads((folder / "attribution.json").read_text())["receivers"]
    print(f"router  {label(chosen)}  mean of the {len(others)} others  largest")
    for number, receiver in enumerate(receivers):
        change = chosen["rank_change"][number]
        if change is not None:
            beside = [sender["rank_change"][number] for sender in others]
            shown = "  ".join(f"{value:.4f}" for value in (change, fmean(beside), max(beside)))
            print(f"L{receiver['layer']}  {shown}")


def strongest_two(folder: Path) -> list[str]:
    """Return the strongest experts of two layers, hubs first."""
    content = json.loads((folder / "attribution.json").read_text(encoding="utf-8"))
    hubs = [{"layer": hub["layer"], "number": hub["expert"]} for hub in content["hubs"]]
    strongest = dict[int, str]()
    for sender in (*hubs, *experts_of(folder)):
        strongest.setdefault(sender["layer"], label(sender))
    return [*strongest.values()][:2]


def prompt(draw: random.Random) -> tuple[str, dict[str, range]]:
    """Return a prompt whose answer is the first name, and the characters of its roles."""
    given, subject = draw.sample(NAMES, 2)
    place, thing = draw.choice(PLACES), draw.choice(THINGS)
    text = f"When {given} and {subject} went to the {place}, {subject} gave a {thing} to"
    starts = {"IO": text.index(given), "S1": text.index(subject), "S2": text.rindex(subject)}
    spans = {}
    for role, start in starts.items():
        spans[role] = range(start, start + len(given if role == "IO" else subject))
    return text, spans


def roles_of(offsets: list[tuple[int, int]], spans: dict[str, range]) -> list[str]:
    """Return the role of each token by its characters; a token may begin with the space before a word."""
    roles = ["other"] * len(offsets)
    for number, (start, end) in enumerate(offsets):
        for role, span in spans.items():
            if start < span.stop and end > span.start:
                roles[number] = role
    roles[0] = "start"
    roles[-1] = "END"
    return roles


def ioi(name: str, prompts: int, top: int, out: Path | None) -> None:
    """Print whose words the strongest heads read when they steer the last token's routing."""
    model = open_model(locate(name), "auto", "auto")
    tokenizer = load_tokenizer(model.source.folder)
    draw = random.Random(0)
    batches, roles = [], []
    for _ in range(prompts):
        text, spans = prompt(draw)
        encoded = tokenizer(text, return_offsets_mapping=True)
        batches.append(torch.tensor([encoded["input_ids"]]))
        roles.append(roles_of(encoded["offset_mapping"], spans))
    calibration = Calibration(tuple(batches), {"source": "IOI"})
    found = attribute(model, calibration, Silent(), keys=len(batches), top=top)
    totals = {(head.module, head.number): head.total_influence for head in found.of_kind("head")}
    sums: dict[tuple[str, int], Counter[str]] = {}
    labels = {}
    for split in found.per_key:
        head = split.module, split.head
        labels[head] = f"L{split.layer}H{split.head}"
        for role, score in zip(roles[split.sequence], split.last, strict=True):
            sums.setdefault(head, Counter())[role] += score / len(batches)
    rows = []
    for head in sorted(sums, key=lambda head: -totals[head]):
        by_role = {role: sums[head][role] for role in ROLES}
        rows.append({"head": labels[head], "score": totals[head], **by_role})
    print("  ".join(f"{column:>9}" for column in rows[0]))
    for row in rows:
        shown = [value if isinstance(value, str) else f"{value:.3g}" for value in row.values()]
        print("  ".join(f"{value:>9}" for value in shown))
    if out is not None:
        out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run one figure."""
    sizes = {"samples": 32, "keys": 2, "prompts": 16, "top": 10}
    later: dict[str, Any] = dict.fromkeys(("text", "length", "experts"))
    names = ("figures", "zeroing", "blocking", "ioi")
    made = parser(__doc__, names, paper=False, **later, **sizes)
    given = made.parse_args()
    model = given.model
    if given.paper and model == str(DEMO):
        model = "allenai/OLMoE-1B-7B-0924"
    if given.name == "ioi":
        ioi(model, given.prompts, given.top, given.out)
        return
    text = given.text or ("allenai/c4" if given.paper else "demo")
    length = given.length or ("512" if given.paper else "128")
    reading = ["--calibration", text, "--samples", given.samples, "--sequence-length", length]
    out = given.out or Path(given.name)

    def run(folder: Path, *more: object) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        moe_compress("attribute", model, *reading, "-o", folder, *more)

    if given.name == "figures":
        run(out, "--keys", given.keys)
    elif given.name == "zeroing":
        run(out)
        zeroing(out, given.experts)
    else:
        experts = given.experts.split(",") if given.experts else []
        if not experts:
            run(out / "all")
            experts = strongest_two(out / "all")
        if len(experts) != 2:
            made.error("name two experts, such as --experts L1E9,L4E14")
        for blocked in (experts[0], experts[1], ",".join(experts)):
            run(out / f"without-{blocked.replace(',', '-')}", "--without", blocked)


if __name__ == "__main__":
    main()
