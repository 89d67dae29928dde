"""Figures of the influence of every component on every later router.

Routing attribution: "Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs"
(ICLR 2026). A router's logits are the sum of sub-scores, one for each earlier component that wrote
to the residual stream. R routers (receivers), T tokens, E experts."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from compressor.frozen import frozen
from compressor.recipe.hubs import RoutedExpert
from compressor.tolerance import rounded

# what a sender is: the token's embedding, a token mixer (attention or recurrence), one of its
# heads, a dense MLP, a whole MoE layer, one of its routed experts, its shared experts, or anything
# else that writes to the stream; a bias is that of the projection which mixes an attention's heads
KINDS = ("token", "attention", "head", "bias", "mlp", "moe", "expert", "shared", "other")
UNRANKED = ("head", "bias")  # kinds whose AARV is not measured
# whose sub-scores add up to the logits
COMPONENTS = (
    "token",
    "attention",
    "mlp",
    "moe",
    "other",
)
# whose AARV is compared with their influence, apart from that of single experts
ZEROED = (
    *COMPONENTS,
    "shared",
)


def adds_up(kind: str, module: str, split: Container[str]) -> bool:
    """Return True for a sender whose sub-scores add up to the logits with the others', so that
    nothing counts twice.

    `split` are the attention modules whose heads were told apart: there the heads and their bias
    count."""
    return kind != "moe" and not (kind == "attention" and module in split)


ByReceiver = tuple[float | None, ...]  # [R]; None for routers that come before the sender


@frozen
class Receiver:
    """One router whose logits are decomposed."""

    module: str  # the experts module that it serves
    layer: int  # number of the decoder layer
    variance: float  # of the logits over the experts, averaged over tokens
    # largest difference between logits and the sum of sub-scores, over the largest logit
    unexplained: float


@frozen
class Sender:
    """One component, and the figures of its sub-scores for each receiver: None for routers that
    come before it."""

    name: str
    kind: str
    layer: int | None  # number of the decoder layer; None for the token's embedding
    module: str  # the module whose output it is; the experts module for routed experts
    number: int | None  # of the expert or the head
    share: float  # of the tokens that it wrote to
    influence: ByReceiver  # [R] variance of the sub-scores over the experts, averaged over tokens
    positive: ByReceiver  # [R] APS: mean of the positive sub-scores' sum over the experts, over E
    negative: ByReceiver  # [R] ANS: the same of the negative ones
    rank_change: ByReceiver  # [R] AARV; None throughout for heads and their bias
    covariance: ByReceiver  # [R] with the logits over the experts, averaged over tokens

    @property
    def total_influence(self) -> float:
        return sum(value or 0.0 for value in self.influence)

    @property
    def total_rank_change(self) -> float:
        return sum(value or 0.0 for value in self.rank_change)

    @property
    def label(self) -> str:
        """Short and unique unless a layer has several of a kind: 'token', 'L1 E9', 'L3 head 5', 'L3
        attention'."""
        labels = {
            "token": "token",
            "other": self.name,
            "head": f"L{self.layer} head {self.number}",
            "expert": f"L{self.layer} E{self.number}",
        }
        return labels.get(self.kind, f"L{self.layer} {self.kind}")


@frozen
class Output(RoutedExpert):
    """Size of one routed expert's outputs, before its gate weight."""

    tokens: int
    mean_norm: float  # L2, over its tokens
    max_norm: float
    max_entry: float  # largest absolute entry


@frozen
class KeyInfluence:
    """One head's influence on one sequence by key token; shares of the sum over all queries and
    keys."""

    module: str
    layer: int | None
    head: int
    sequence: int
    tokens: tuple[int, ...]  # [L] token ids
    texts: tuple[str, ...]  # [L] of the tokens; empty if the model has no tokenizer
    # [L] of each key: variance of its sub-scores, summed over routers, averaged over L
    influence: tuple[float, ...]
    first: float  # share of the sequence's first token
    own: float  # share of the query's own token
    previous: float  # share of the token before it
    last: tuple[float, ...] = ()  # [L] of each key for the last query alone, summed over routers


@frozen
class ScoreEdge:
    """A sender's part in one expert's score: mean of the squared centred sub-score, over E.

    Summed over the router's experts that is the sender's influence on the router.
    """

    sender: str  # its name
    receiver: int  # number of the router among the receivers
    expert: int
    influence: float


@frozen
class Together:
    """Two experts of consecutive routers that more tokens pass one after the other than chance
    would send."""

    receiver: int  # number of the first one's router among the receivers
    expert: int
    following: int  # the expert of the next router
    # share of the tokens that pass both, less the product of the shares that pass each
    excess: float


@frozen
class Attribution:
    """All figures of one run."""

    model: str
    receivers: tuple[Receiver, ...]
    senders: tuple[Sender, ...]
    outputs: tuple[Output, ...]  # every routed expert
    tokens: int
    calibration: Mapping[str, Any]  # its identity
    versions: Mapping[str, str]
    seconds: Mapping[str, float]  # of each pass
    per_key: tuple[KeyInfluence, ...] = ()  # the strongest heads by key token, if requested
    score_edges: tuple[ScoreEdge, ...] = ()  # the strongest ones, if requested
    together: tuple[Together, ...] = ()
    without: tuple[str, ...] = ()  # experts that no router was allowed to choose, such as L1E9

    def of_kind(self, *kinds: str) -> tuple[Sender, ...]:
        """The senders of these kinds, in model order."""
        return tuple(sender for sender in self.senders if sender.kind in kinds)

    def parts(self) -> tuple[Sender, ...]:
        """The senders whose sub-scores add up to the logits, each part once: heads instead of their
        attention."""
        split = {head.module for head in self.of_kind("head")}
        return tuple(
            sender for sender in self.senders if adds_up(sender.kind, sender.module, split)
        )


@frozen
class KindShare:
    """The share of the influence that comes from components of one kind."""

    kind: str
    senders: int
    influence: float  # summed over senders and receivers
    share: float | None  # of all components' influence; None where there is none


class Pair(NamedTuple):
    """The figures of one sender for one receiver."""

    sender: Sender
    influence: float
    rank_change: float


def sender_labels(senders: Iterable[Sender]) -> list[str]:
    """The label of each, or its full name where two would be labelled alike."""
    return _unique([(sender.label, sender.name) for sender in senders])


def router_labels(receivers: Iterable[Receiver]) -> list[str]:
    """'L3 router' for each, or with its experts module's name where a layer has several."""
    labels = [(f"L{receiver.layer} router", receiver.module) for receiver in receivers]
    return _unique([(label, f"{label} of {module}") for label, module in labels])


def _unique(named: Sequence[tuple[str, str]]) -> list[str]:
    """The first, short name of each, or its second where two have the same short one."""
    counts = Counter(label for label, _ in named)
    return [label if counts[label] == 1 else name for label, name in named]


def strongest(senders: Iterable[Sender], top: int) -> tuple[Sender, ...]:
    """Return at most `top` senders with any influence, the greatest total first, equal ones in
    model order."""
    influential = [sender for sender in senders if sender.total_influence > 0]
    return tuple(sorted(influential, key=lambda sender: -sender.total_influence)[:top])


def kind_shares(attribution: Attribution) -> tuple[KindShare, ...]:
    """Return the share of each kind of component in routing; heads, experts and shared experts are
    parts of others."""
    whole = math.fsum(sender.total_influence for sender in attribution.of_kind(*COMPONENTS))
    shares = []
    for kind in COMPONENTS:
        influences = [sender.total_influence for sender in attribution.of_kind(kind)]
        if influences:
            total = math.fsum(influences)
            shares.append(KindShare(kind, len(influences), total, total / whole if whole else None))
    return tuple(shares)


def is_measured(value: float | None) -> TypeGuard[float]:
    """Return True for a number that is neither missing nor infinite."""
    return value is not None and math.isfinite(value)


def pairs(attribution: Attribution, *kinds: str) -> Iterator[Pair]:
    """Influence and AARV of each sender of these kinds on each receiver for which both were
    measured."""
    for sender in attribution.of_kind(*kinds):
        for influence, change in zip(sender.influence, sender.rank_change, strict=True):
            if is_measured(influence) and is_measured(change):
                yield Pair(sender, influence, change)


def rank_correlation(pairs: Sequence[Pair]) -> float | None:
    """Return Spearman's rank correlation of influence and AARV.

    None where all values of one side are the same, or there are fewer than 3.
    """
    from scipy.stats import spearmanr

    influences = [pair.influence for pair in pairs]
    changes = [pair.rank_change for pair in pairs]
    if len(pairs) < 3 or len(set(influences)) == 1 or len(set(changes)) == 1:
        return None
    return float(spearmanr(influences, changes).statistic)


def equal_where_tied(values: Iterable[float]) -> list[float]:
    """Return the numbers with those equal that differ by rounding alone."""
    equal: list[float] = rounded(torch.tensor([*values], dtype=torch.float64)).tolist()
    return equal
