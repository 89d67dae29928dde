"""What the reports of a routing attribution say: labels, the strongest senders, shares of the kinds, plain JSON."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from compressor.attribution.figures import UNRANKED, Attribution, Receiver, Sender
from compressor.attribution.hubs import Hub, SuperExpert, overlap
from compressor.data.sources import without_folders
from compressor.records import finite, plain_json

COMPONENTS = ("token", "attention", "mlp", "moe", "other")  # whose sub-scores add up to the logits
ZEROED = (*COMPONENTS, "shared")  # whose AARV is compared with their influence, apart from that of single experts
DIGITS = 6  # significant ones of a number in JSON


@dataclass(frozen=True, slots=True)
class KindShare:
    """How much of the influence comes from components of one kind."""

    kind: str
    senders: int
    influence: float  # summed over senders and receivers
    share: float | None  # of all components' influence; None where there is none


@dataclass(frozen=True, slots=True)
class Pair:
    """What one sender does to one receiver."""

    sender: Sender
    influence: float
    rank_change: float


def expert_label(layer: int, expert: int) -> str:
    """1, 9 -> 'L1 E9'."""
    return f"L{layer} E{expert}"


def sender_label(sender: Sender) -> str:
    """Short and unique unless a layer has several of a kind: 'token', 'L1 E9', 'L3 head 5', 'L3 attention'."""
    if sender.layer is None or sender.kind == "other":
        return sender.kind if sender.kind == "token" else sender.name
    if sender.number is None:
        return f"L{sender.layer} {sender.kind}"
    if sender.kind == "expert":
        return expert_label(sender.layer, sender.number)
    return f"L{sender.layer} {sender.kind} {sender.number}"


def sender_labels(senders: Iterable[Sender]) -> list[str]:
    """The label of each, or its full name where two would be labelled alike."""
    named = [(sender_label(sender), sender.name) for sender in senders]
    often = Counter(label for label, _ in named)
    return [label if often[label] == 1 else name for label, name in named]


def router_labels(receivers: Iterable[Receiver]) -> list[str]:
    """'L3 router' for each, or with its experts module's name where a layer has several."""
    named = [(f"L{receiver.layer} router", receiver.module) for receiver in receivers]
    often = Counter(label for label, _ in named)
    return [label if often[label] == 1 else f"{label} of {module}" for label, module in named]


def strongest(senders: Iterable[Sender], top: int) -> tuple[Sender, ...]:
    """At most `top` senders with any influence, the greatest total first, model order among equal ones."""
    found = [sender for sender in senders if sender.total_influence > 0]
    return tuple(sorted(found, key=lambda sender: -sender.total_influence)[:top])


def kind_shares(attribution: Attribution) -> tuple[KindShare, ...]:
    """Which kinds of component shape routing; heads, experts and shared experts are parts of others."""
    totals = {kind: [sender.total_influence for sender in attribution.of_kind(kind)] for kind in COMPONENTS}
    whole = math.fsum(value for found in totals.values() for value in found)
    return tuple(
        KindShare(kind, len(found), math.fsum(found), math.fsum(found) / whole if whole else None)
        for kind, found in totals.items()
        if found
    )


def pairs(attribution: Attribution, *kinds: str) -> Iterator[Pair]:
    """Influence and AARV of each sender of these kinds on each receiver for which both were measured."""
    for sender in attribution.of_kind(*kinds):
        for influence, change in zip(sender.influence, sender.rank_change, strict=True):
            if influence is not None and change is not None and math.isfinite(influence) and math.isfinite(change):
                yield Pair(sender, influence, change)


def rank_correlation(found: Sequence[Pair]) -> float | None:
    """Spearman's, of influence and AARV."""
    return spearman([pair.influence for pair in found], [pair.rank_change for pair in found])


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The rank correlation; None where all values of one side are the same, or there are fewer than 3."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)


def rounded(content: Any) -> Any:
    """Numbers to 6 significant digits, None for what JSON cannot write, dataclasses and mappings as plain objects."""
    return plain_json(content, lambda value: finite(float(f"{value:.{DIGITS}g}")))


def _experts(found: Iterable[Hub | SuperExpert]) -> list[dict[str, Any]]:
    return [{"module": each.module, "layer": each.layer, "expert": each.expert} for each in found]


def brief_content(attribution: Attribution, hubs: Sequence[Hub], supers: Sequence[SuperExpert]) -> dict[str, Any]:
    """What can be read at a glance, as plain JSON types."""
    shared = overlap(hubs, supers)
    return {
        "model": attribution.model,
        "tokens": attribution.tokens,
        "hubs": rounded(tuple(hubs)),
        "super_experts": rounded(tuple(supers)),
        "overlap": {
            "both": _experts(shared.both),
            "only_hubs": _experts(shared.only_hubs),
            "only_super_experts": _experts(shared.only_supers),
            "jaccard": rounded(shared.jaccard),
        },
        "receivers": rounded(attribution.receivers),
        "kinds": rounded(kind_shares(attribution)),
        "seconds": rounded(attribution.seconds),
    }


def full_content(
    attribution: Attribution, hubs: Sequence[Hub], supers: Sequence[SuperExpert], threshold: float
) -> dict[str, Any]:
    """Everything, as plain JSON types; calibration sources without folders."""
    return {
        **brief_content(attribution, hubs, supers),
        "threshold": rounded(threshold),
        "rank_correlation": {
            "components": rounded(rank_correlation([*pairs(attribution, *ZEROED)])),
            "experts": rounded(rank_correlation([*pairs(attribution, "expert")])),
        },
        "senders": [
            {
                **rounded(sender),
                "total_influence": rounded(float(sender.total_influence)),
                "total_rank_change": None if sender.kind in UNRANKED else rounded(float(sender.total_rank_change)),
            }
            for sender in attribution.senders
        ],
        "outputs": rounded(attribution.outputs),
        "calibration": rounded(without_folders(attribution.calibration)) if attribution.calibration else {},
        "versions": dict(attribution.versions),
        "per_key": rounded(attribution.per_key),
    }
