"""What a push adds for the Hub's own pages: results on benchmarks, data sets, the base and a name as the field's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import EvalResultEntry, ModelCard, parse_eval_result_entries

from compressor.answers.models import identity
from compressor.answers.tasks import EvaluationTask
from compressor.checkpoint.source import ModelSource
from compressor.data.sources import read_blend
from compressor.errors import CompressionError
from compressor.hub.card import card_text, suggested_name
from compressor.hub.check import EVAL_RESULTS, superseded
from compressor.hub.push import push
from compressor.quality_gate.report import card_metrics, gate_json
from compressor.recipe.steps_plan import Plan
from compressor.steps.quantize.options import Quantize
from tests.support import small
from tests.support.gate_results import gate, task
from tests.support.hub import Hub
from tests.support.hub.cards import mistakes
from tests.support.hub_pushes import REPOSITORY

BENCHMARKS = {"boolq": ("google/boolq", "default"), "arc": ("allenai/ai2_arc", "ARC-Easy")}


def edited(folder: Path, change: Any) -> Path:
    def edit(record: dict[str, Any]) -> None:
        change(record["plan"])
        record["plan_digest"] = Plan.from_dict(record["plan"]).digest()

    small.edit_json(folder / "compression.json", edit)
    return folder


def front(folder: Path, **more: Any) -> dict[str, Any]:
    header: dict[str, Any] = yaml.safe_load(card_text(folder, REPOSITORY, **more).text.split("---\n")[1])
    assert mistakes(header) == []
    return header


@pytest.mark.parametrize(
    ("parts", "benchmark"),
    [
        ([("openai/gsm8k", "main")], ("openai/gsm8k", "main")),
        ([("Rowan/hellaswag", None)], ("Rowan/hellaswag", "default")),
        ([("cais/mmlu", "law"), ("cais/mmlu", "virology")], ("cais/mmlu", "group")),
        ([("org/a", None), ("org/b", None)], None),
        ([("json", None)], None),
        ([(None, None)], None),
    ],
)
def test_a_benchmark_is_what_the_definition_of_a_task_reads(parts: Any, benchmark: Any) -> None:
    configs = [{"dataset_path": path, "dataset_name": name} for path, name in parts]
    tasks = {str(number): SimpleNamespace(get_config=config.get) for number, config in enumerate(configs)}
    assert EvaluationTask("group", "1", tasks, len(parts) > 1, None, (1,)).benchmark == benchmark


def test_results_on_benchmarks_are_pushed_and_go_with_the_weights(folder: Path, hub: Hub) -> None:
    judged = identity(ModelSource(str(folder), None, folder))
    result = gate(task("boolq"), task("arc"), task("mine"), compressed_identity=judged, benchmarks=BENCHMARKS)
    (folder / "gate.json").write_text(gate_json(result))
    push(folder, REPOSITORY)
    there = hub.repositories[REPOSITORY]
    entries = parse_eval_result_entries(yaml.safe_load(there.files()[EVAL_RESULTS]))
    notes = "acc on 500 items, {} 2.0 of lm-eval 0.4.13"
    assert entries == [
        EvalResultEntry(dataset_id, task_id, 0.746, notes=notes.format(name))
        for name, (dataset_id, task_id) in BENCHMARKS.items()
    ]
    assert EVAL_RESULTS.startswith(".eval_results/") and EVAL_RESULTS.endswith(".yaml")
    types = [metric.dataset_type for metric in card_metrics(result)]
    assert types == ["google/boolq", "allenai/ai2_arc", "mine"]
    assert ModelCard(there.files()["README.md"].decode()).data.eval_results == card_metrics(result)
    (folder / "gate.json").unlink()
    assert EVAL_RESULTS in there.files() and not push(folder, REPOSITORY, dry_run=True).removed  # of the same weights
    assert superseded([EVAL_RESULTS], [], weights_change=True) == (EVAL_RESULTS,)


def test_data_sets_and_limits_are_those_that_were_read(folder: Path) -> None:
    assert "datasets" not in front(folder)
    blend = [entry.source for entry in read_blend()]

    def read(plan: dict[str, Any], *sources: str, **more: Any) -> None:
        entries = [{"source": source, "weight": 0.25} for source in sources]
        plan["calibration"] = {"source": " + ".join(sources), "sources": entries, **more}
        for name in ("samples", "tokens", "seed", "sequence_length"):
            plan["calibration"][name] = 8

    edited(folder, lambda plan: read(plan, blend[1], blend[5], "a.jsonl", "org/set:x@y", left_out=["org/gone"]))
    assert front(folder)["datasets"] == [blend[1].split("@")[0], blend[5].split("@")[0], "org/set"]
    text = " ".join(card_text(folder, REPOSITORY).text.split())
    assert "calibration text was code, tool calls, a.jsonl and org/set:x@y; what experts do on other" in text
    assert "Sources that could not be read: org/gone." in text


def test_a_local_base_has_the_name_that_is_given(folder: Path, hub: Hub) -> None:
    assert {"base_model", "base_model_relation"}.isdisjoint(front(folder))
    hub.create("org/base", {"README.md": b"---\nlicense: mit\nlanguage: de\n---\n"})
    header = front(folder, base_model="org/base")
    assert (header["base_model"], header["base_model_relation"]) == ("org/base", "finetune")
    assert (header["license"], header["language"]) == ("mit", ["de"])
    before = small.tree(folder)
    push(folder, REPOSITORY, base_model="org/base")
    assert b"base_model: org/base" in hub.repositories[REPOSITORY].files()["README.md"]
    assert small.tree(folder) == before
    with pytest.raises(CompressionError, match="'a/b/c' is no model on the Hub"):
        push(folder, REPOSITORY, base_model="a/b/c")
    edited(folder, lambda plan: plan["source"].update(model="org/other", revision="0" * 40))
    with pytest.raises(CompressionError, match="was made from org/other, not org/base; leave --base-model out"):
        card_text(folder, REPOSITORY, base_model="org/base")


def test_a_name_as_the_fields_is_suggested(folder: Path, hub: Hub) -> None:
    with pytest.raises(CompressionError, match="name it NAMESPACE/NAME, such as org/model"):
        push(folder, "org")
    assert push(folder, "org/").repo_id == "org/base-E4of8" and "org/base-E4of8" in hub.repositories
    decided = {"format": "pack-quantized", "group_size": -1, "matrices": 1, "weights": 1, "bits": 4}
    step = {"name": "quantize", "options": Quantize(scheme="int4").model_dump(mode="json")}
    step["plan"] = {**decided, "dequantized": False}
    edited(folder, lambda plan: plan["steps"].append(step))
    assert suggested_name(folder) == "base-E4of8-W4A16"
    step["options"]["scheme"] = "fp8"
    edited(folder, lambda plan: plan["steps"].__setitem__(-1, step))
    assert suggested_name(folder) == "base-E4of8-FP8"
    (folder / "compression.json").unlink()
    assert suggested_name(folder) == "smaller"
