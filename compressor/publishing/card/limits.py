"""What was and was not measured of a compressed checkpoint, and what it lacks, in plain sentences."""

from collections.abc import Mapping
from typing import Any

from compressor.document.blocks import Block, Heading, Items
from compressor.gates.verdict import GateResult
from compressor.planning.further import sources_of
from compressor.publishing.card.facts import Facts, Graph, entry_of
from compressor.publishing.card.metadata import base_id
from compressor.recipe.plan import CompressionPlan
from compressor.words import counted, human_bytes, joined, label, one_line

MOST_NAMED = 8  # of a list of tensors


def limits(facts: Facts, has_licence: bool) -> tuple[Block, ...]:
    """The last section; `has_licence` if the card inherits one."""
    is_local = base_id(facts.plan) is None
    told = [
        _accuracy(facts.gate),
        _text(facts.plan),
        _refitted(facts.plan),
        _format(facts),
        *([_constants()] if facts.plan.constants is not None else []),
        *_missing(facts.record),
        *([_graph(facts.graph)] if facts.graph is not None else []),
        *(["The base was a local folder; which repository it came from is not recorded."] if is_local else []),
        *([] if has_licence else ["No licence was found in a card of the base; the base's own terms hold."]),
    ]
    return Heading("Limits"), Items(tuple(told))


def _accuracy(gate: GateResult | None) -> str:
    if gate is None:
        return (
            "Accuracy was not measured: there is no gate result for these weights. Compare it with the original on "
            "your own tasks before you use it."
        )
    limit = gate.options.get("limit")
    first = f" (the first {limit:,} items of each at most)" if type(limit) is int else ""
    tasks = joined([one_line(task.task) for task in gate.tasks]) or "no task"
    told = f"Accuracy was measured on {tasks}{first} and on nothing else; the verdict is {gate.verdict}."
    if gate.routing is None:
        return told
    return (
        f"{told} It is of answers on pathways that {one_line(gate.routing.method)} optimised at test time; as stock "
        "loaders run these weights, their accuracy was not measured."
    )


def _text(plan: CompressionPlan) -> str:
    if plan.calibration is None:
        if plan.bake is None and plan.recover is None:
            return "No text was read: weights alone decided."
        return "No text was read to choose experts: weights alone decided."
    names = [label(str(entry["source"])) for entry in sources_of(plan.calibration)] or ["unnamed text"]
    only = plan.calibration.get("only")
    chosen = [label(str(only))] if only is not None else names
    tokens = plan.calibration.get("tokens")
    many = f" ({tokens:,} tokens, held-out ones included)" if type(tokens) is int and only is None else ""
    return f"The calibration text was {joined(chosen)}{many}. What experts do on other kinds of text did not count."


def _refitted(plan: CompressionPlan) -> str:
    """What was tuned afterwards, and what that leaves; a bake or a recovery that changed nothing does not count."""
    errors = "The errors before and after are those of single layers and say nothing about accuracy."
    corrected = "The correction brings back each layer's own output on the calibration text; "
    if plan.recovered:
        told = (
            "The recovery trained what is left end to end on text that its maker chose, toward the original; what the "
            "original gets wrong, and what that text does not show, did not come closer to right."
        )
    elif plan.baked:
        before = "" if plan.correction is None else corrected
        told = (
            f"{before}the bake moved the routers alone toward the original's next token, on text that its maker chose."
        )
        told = told[0].upper() + told[1:]
    elif plan.correction is None:
        return "Nothing was refitted or fine-tuned after experts were taken out."
    else:
        told = f"{corrected}nothing was fine-tuned end to end."
    return told if plan.correction is None else f"{told} {errors}"


def _format(facts: Facts) -> str:
    if facts.only_graph:
        return "There are no safetensors here, only the ONNX graph."
    names = joined([f"{one_line(name)} ({count:,} elements)" for name, count in facts.dtypes.items()])
    kind = facts.quantization.get("quant_method")
    if facts.quantization:
        return f"The weights are quantised as the original's are ({one_line(str(kind))}), stored as {names}."
    return f"The weights are not quantised; they are stored as {names}."


def _constants() -> str:
    return (
        "Stock transformers, and whatever loads by it, cannot load this format. It was checked by the tool's own "
        "forward: the written tensors give the logits that the original gives with these constants."
    )


def _missing(record: Mapping[str, Any]) -> list[str]:
    """Tensors that were left out, and config fields that announced them."""
    found = []
    if names := _names(record.get("left_out")):
        more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
        found.append(
            f"{counted(len(names), 'tensor')} of the original that stock transformers does not load "
            f"{'is' if len(names) == 1 else 'are'} left out: {', '.join(map(one_line, names[:MOST_NAMED]))}{more}."
        )
    if fields := _names(record.get("zeroed_fields")):
        found.append(
            f"Set to zero in the config, since their tensors are left out: {joined([*map(one_line, fields)])}."
        )
    return found


def _names(value: Any) -> list[str]:
    return [str(entry) for entry in value] if isinstance(value, list) else []


def _graph(graph: Graph) -> str:
    """How the ONNX graph was verified, as its record has it."""
    options, checks, rounding = (entry_of(graph.record, name) for name in ("options", "verification", "rounding"))
    quantize = options.get("quantize")
    experts = f"experts {one_line(str(quantize))}" if quantize != "none" else "not quantised"
    told = f"The ONNX graph ({one_line(str(options.get('dtype')))}, {experts}, {human_bytes(graph.nbytes)})"
    difference, compared = checks.get("largest_difference"), checks.get("tokens_compared")
    if isinstance(difference, float | int):
        other = one_line(str(checks.get("reference", "the stock model")))
        told += f" was compared with {other}: logits differ by at most {difference:.2g}"
        if type(compared) is int and type(checks.get("tokens_equal")) is int and compared:
            told += f", and {checks['tokens_equal']:,} of {compared:,} greedy tokens are the same"
    cost = rounding.get("largest_difference")
    if isinstance(cost, float | int):
        told += f"; rounding alone moved logits by up to {cost:.2g}"
    return told + "."
