"""Which servers run a model at full speed and which do not, and the nearest number of experts that all of them do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from compressor.serving.rules import RULES, SERVERS, Effect, Rule, Served, said

PAGE = "docs/how-to/serving.md"


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule that a model does not keep."""

    server: str
    effect: Effect
    says: str
    needs: str
    version: str
    source: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What servers make of a number of experts; `nearest` is the nearest that suits all of them, None for none.

    It is the number itself where that suits, by the rules on numbers of experts; width and head are another matter.
    """

    experts: int
    top_k: int
    width: int
    full_speed: tuple[str, ...]
    breaches: tuple[Breach, ...]
    nearest: int | None


def broken(model: Served) -> tuple[Rule, ...]:
    """The rules that a model does not keep."""
    return tuple(rule for rule in RULES if rule.concerns(model) and not rule.holds(model))


def nearest_count(model: Served, counts: Iterable[int]) -> int | None:
    """The nearest of `counts` that breaks no rule on numbers of experts, the larger of two; None if there is none."""

    def kept(count: int) -> bool:
        return all(rule.about != "experts" for rule in broken(replace(model, experts=count)))

    return min(filter(kept, counts), key=lambda count: (abs(count - model.experts), -count), default=None)


def advise(model: Served, counts: Iterable[int] = ()) -> Advice:
    """What servers make of a model; `counts` are the other numbers of experts that it could have."""
    found = broken(model)
    servers = {rule.server for rule in found}
    return Advice(
        model.experts,
        model.top_k,
        model.width,
        full_speed=tuple(server for server in SERVERS if server not in servers),
        breaches=tuple(
            Breach(rule.server, rule.effect, said(rule, model), rule.needs, rule.version, rule.source) for rule in found
        ),
        nearest=nearest_count(model, (model.experts, *counts)),
    )


def warnings(advice: Advice, before: Sequence[Rule] = ()) -> list[str]:
    """One sentence for each server that `advice` speaks against, and one with the nearest number for all.

    What is slower or larger by a rule that the source does not keep either (`before`) is left out.
    """
    alike = {(rule.server, rule.needs) for rule in before if rule.effect in ("slower", "larger")}
    told: dict[str, list[str]] = {}
    for breach in advice.breaches:
        if (breach.server, breach.needs) not in alike:
            told.setdefault(breach.server, []).append(breach.says)
    lines = [f"{server} {'; it '.join(parts)}" for server, parts in told.items()]
    if lines and advice.nearest not in (None, advice.experts):
        lines.append(f"the nearest number of experts that suits all servers is {advice.nearest}; see {PAGE}")
    return lines
