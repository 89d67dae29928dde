"""A plan as the list that a server takes beside a checkpoint: vllm-ascend's keep list, or vLLM's
`constant-v1`.

vllm-ascend (pull request 12525 at e8f9ee3, Qwen3-MoE) prunes the base while it loads it.
`experts.jsonl` has a line `{"LAYER": [EXPERT, ...]}` for each MoE layer. The client keeps the first
int(E (1 - expert_prune_ratio)) of each line, in this order, with the router's rows.

vLLM 0.33 reads constants from `approximate_experts`, as the step `constants` writes it, or from
`compression_config`, which names each constant's tensor, and refuses a config with both.
`hf_overrides.json` trades the one for the other."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compressor.document.blocks import Block, Code, Facts, Heading, Text
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.constant_experts import FIELD, SUFFIX, SubstitutedCheckpoint
from compressor.model.remote_code import json_bytes
from compressor.pipeline.outcome import read_plan
from compressor.progress import Progress
from compressor.recipe.steps_plan import PRUNE, Plan
from compressor.records import Json, read_object

PLANS = True  # a plan file will do in place of a checkpoint
ASCEND = "vllm-ascend (pull request 12525 at e8f9ee3), Qwen3-MoE only"
VLLM = "vLLM 0.33 or later"
LIST = "experts.jsonl"
OVERRIDES = "hf_overrides.json"
RECORD = "keep_list.json"


@frozen
class ListSummary:
    """The list that was written, and how it is served."""

    folder: Path
    client: str
    # that is served with the list: the base, or the output itself where that holds constants
    model: str
    revision: str | None
    layers: int
    experts: int  # of each layer, before
    kept: int  # over all layers
    expert_prune_ratio: float | None  # None for constants
    not_listed: tuple[str, ...]  # steps that changed weights, of which the list says nothing

    def to_dict(self) -> Json:
        return {**asdict(self), "folder": str(self.folder), "command": self.command}

    @property
    def command(self) -> str:
        """The server's command line."""
        words = ["vllm", "serve", self.model]
        if self.revision:
            words += ["--revision", self.revision]
        if self.expert_prune_ratio is None:
            overrides = shlex.quote(str(self.folder / OVERRIDES))
            return f'{shlex.join(words)} --hf-overrides "$(cat {overrides})"'
        config = {
            "expert_list_file": str(self.folder / LIST),
            "expert_prune_ratio": self.expert_prune_ratio,
        }
        return shlex.join([*words, "--additional-config", json.dumps(config)])

    def describe(self) -> tuple[Block, ...]:
        """Counts, the client and its command; a line for steps that the list leaves out."""
        facts = (
            ("client", self.client),
            ("MoE layers", str(self.layers)),
            ("experts kept", f"{self.kept} of {self.layers * self.experts}"),
        )
        blocks: list[Block] = [Heading("Exported as keep-list"), Facts(facts)]
        if self.not_listed:
            blocks.append(
                Text(
                    "The list has the base's experts as they are, without what these steps did: "
                    f"{', '.join(self.not_listed)}"
                )
            )
        return (*blocks, Text(("Serve with ", Code(self.command))))


def export(checkpoint: Path, output: Path, options: None, progress: Progress) -> ListSummary:
    """Write the list of a plan file, or of the plan in an output folder, to the new folder
    `output`.

    Raises `CompressionError` for a plan that no list can express: merged or split experts, a
    smaller top-k."""
    plan = read_plan(checkpoint)
    expert_plan = plan.expert_plan
    if not expert_plan.layers:
        raise CompressionError(
            f"{checkpoint.name} decides on no experts, so there is nothing to list; prune first"
        )
    if expert_plan.has_constants:
        summary, name, content = _constants(plan, checkpoint, output)
    else:
        summary, name, content = _kept(plan, output)
    output.mkdir()
    record = {field: value for field, value in asdict(summary).items() if field != "folder"}
    (output / name).write_text(content, encoding="utf-8")
    (output / RECORD).write_bytes(json_bytes(record))
    return summary


def read_summary(output: Path) -> ListSummary:
    """The summary that `export` returned, from the record that it left in `output`."""
    record = read_object(output / RECORD)
    return ListSummary(output, **{**record, "not_listed": tuple(record["not_listed"])})


def prune_ratio(experts: int, kept: int) -> float:
    """The `expert_prune_ratio` by which vllm-ascend keeps so many: int(experts * (1 - ratio)) ==
    kept."""
    ratio = 1 - kept / experts
    return ratio if int(experts * (1 - ratio)) == kept else (experts - kept - 0.5) / experts


def _kept(plan: Plan, output: Path) -> tuple[ListSummary, str, str]:
    """Return summary, name and content of a keep list; refuses a plan whose output is not the base
    with fewer of its experts."""
    expert_plan = plan.expert_plan
    layers = expert_plan.layers
    if plan.split is not None:
        raise CompressionError(
            "a keep list names experts of the base, and this plan splits each into "
            f"{plan.split['parts']}"
        )
    if expert_plan.top_k is not None:
        raise CompressionError(
            "a keep list leaves the base's top-k, and this plan routes tokens to "
            f"{expert_plan.top_k} experts"
        )
    lines = []
    for layer in layers:
        if not layer.is_drop:
            raise CompressionError(
                f"{layer.module}: a keep list can drop experts, and this plan merges or scales "
                "them; plan with a strategy that drops, such as reap"
            )
        lines.append(json.dumps({str(layer.layer): list(layer.slots())}) + "\n")
    if len({layer.layer for layer in layers}) < len(layers):
        raise CompressionError(
            "a keep list has one line for a decoder layer, and this model's have several routers"
        )
    if len({(layer.experts, len(layer.groups)) for layer in layers}) > 1:
        raise CompressionError(
            "a keep list has one ratio for all layers, and this model's have unequal numbers"
        )
    experts = layers[0].experts
    not_listed = ["correct"] if plan.correction else []
    not_listed += [step.name for step in plan.steps if step.name != PRUNE]
    summary = ListSummary(
        folder=output,
        client=ASCEND,
        model=plan.source.label,
        revision=plan.source.revision,
        layers=len(layers),
        experts=experts,
        kept=expert_plan.experts * len(layers),
        expert_prune_ratio=prune_ratio(experts, expert_plan.experts),
        not_listed=tuple(dict.fromkeys(not_listed)),
    )
    return summary, LIST, "".join(lines)


def _constants(plan: Plan, folder: Path, output: Path) -> tuple[ListSummary, str, str]:
    if folder.is_file():
        raise CompressionError(
            f"{folder.name} is a plan, which holds no constants; name the output made by it"
        )
    experts = {layer.layer: layer.experts for layer in plan.expert_plan.layers}
    constants = SubstitutedCheckpoint(folder).constants
    targets = dict[str, dict[str, Any]]()
    for (layer, expert), info in sorted(constants.items()):
        path = info.name.removesuffix(SUFFIX).rpartition(".")[0]
        if path not in targets:
            targets[path] = {
                "num_logical_experts": experts[layer],
                "weight_layout": "compact_retained_experts",
                "replacements": {},
            }
        replacement = {"format": "constant-v1", "tensors": {"value": info.name}}
        targets[path]["replacements"][str(expert)] = replacement
    semantics = {
        "preserve_logical_expert_ids": True,
        "preserve_router_weights": True,
        "renormalize_after_substitution": False,
    }
    substitution = {"version": 1, "router_semantics": semantics, "targets": targets}
    overrides = {
        FIELD: None,
        "compression_config": {"transform_config": {"expert_substitution": substitution}},
    }
    summary = ListSummary(
        folder=output,
        client=VLLM,
        model=folder.name,
        revision=None,
        layers=len(experts),
        experts=plan.expert_plan.layers[0].experts,
        kept=sum(experts.values()) - len(constants),
        expert_prune_ratio=None,
        not_listed=(),
    )
    return summary, OVERRIDES, json.dumps(overrides, indent=2) + "\n"
