import json
import math
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers import AutoModelForCausalLM

from compressor import api
from compressor.answers.models import identity
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.hub.card import Card, card_text
from compressor.quality_gate.report import card_metrics, gate_json
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.step import StepOptions
from compressor.recipe.steps_plan import Plan, PlannedStep
from compressor.steps.quantize.options import Quantize
from compressor.steps.step import Step
from tests.support import small
from tests.support.gate_results import gate, mixed, task
from tests.support.hub.cards import mistakes
from tests.support.hub_pushes import export_record
from tests.support.plans import pruned

DEMO = Path("compressor/demo/checkpoint").absolute()
REPOSITORY = "me/small-moe"
GRID = "images/experts.png"
TOKEN = "hf_" + "Canary" * 6
HOSTILE = f"a|b`c` <script>alert(1)</script>\n---\nx: [y](javascript:z) *e* &amp; {TOKEN} \u202e"
ON_ONE_LINE = " ".join(HOSTILE.replace("\u202e", "").split())  # as names of strategies and tasks are


def make(place: Path, name: str, **wanted: Any) -> Path:
    asked = {"experts": 12, "calibration": "demo", "samples": 4, "sequence_length": 32, **wanted}
    api.compress(str(DEMO), place / name, **asked)
    return place / name


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("private"), "dropped", strategy="count-guided")


@pytest.fixture
def copied(dropped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dropped, tmp_path / "secret folder" / "small"))


def body(card: Card) -> str:
    return card.text.split("\n---\n", 1)[1]


def html(card: Card) -> str:
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(body(card))


def table(card: Card, heading: str) -> dict[str, list[str]]:
    """Rows of the first table below a heading, by their first cell."""
    lines = body(card).split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0].splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def counted(folder: Path) -> tuple[int, int]:
    """Elements and bytes of all tensors, from the headers of the safetensors files."""
    parameters = nbytes = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        header.pop("__metadata__", None)
        parameters += sum(math.prod(entry["shape"]) for entry in header.values())
        nbytes += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    return parameters, nbytes


def active(folder: Path) -> int:
    """Parameters of the stock model less those of all but top-k experts, from the model in memory."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    total = sum(value.numel() for value in model.parameters())
    for layer in model.model.layers:
        for value in layer.mlp.experts.parameters():
            total -= value[0].numel() * (len(value) - model.config.num_experts_per_tok)
    return total


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    record = json.loads((folder / "compression.json").read_text())
    change(record)
    (folder / "compression.json").write_text(json.dumps(record))
    return folder


def about(folder: Path, result: GateResult) -> GateResult:
    return replace(result, compressed_identity=identity(ModelSource(str(folder), None, folder)))


def test_every_figure_is_that_of_the_files(dropped: Path) -> None:
    rows = table(card_text(dropped, REPOSITORY), "Before and after")
    before, after = counted(DEMO), counted(dropped)
    for place, name in enumerate(("parameters", "bytes")):
        assert rows[name][3:] == [f"{before[place]:,}", f"{after[place]:,}"]
    assert rows["parameters"][2] == f"{100 * after[0] / before[0]:.1f}%"
    assert rows["active parameters"][3:] == [f"{active(DEMO):,}", f"{active(dropped):,}"]
    assert rows["experts per layer"][:3] == ["16", "12", "75.0%"]
    assert f"BF16 ({after[0]:,} elements)" in body(card_text(dropped, REPOSITORY))


def test_a_pure_drop_says_what_it_is_and_that_nobody_measured_it(dropped: Path) -> None:
    card = card_text(dropped, REPOSITORY)
    text, data = body(card), ModelCard(card.text).data
    assert "12 instead of 16 experts in each of its 4 MoE layers: 48 experts kept and 16 dropped" in text
    assert "(Count-guided: drop the experts that the fewest tokens are routed to (He et al. 2024" in text
    assert "Accuracy was not measured" in text and "verdict" not in text and "Nothing was refitted" in text
    assert {"moe", "moe-compressor", "count-guided", "pruned", "expert-pruning"} == set(data.tags)
    assert (data.library_name, data.pipeline_tag, data.base_model, data.eval_results) == (
        "transformers", "text-generation", None, None,
    )  # fmt: skip
    assert 'AutoModelForCausalLM.from_pretrained("me/small-moe", dtype="auto", device_map="auto")' in text
    assert "vllm serve me/small-moe" in text and "onnx" not in card.text.lower()
    record = json.loads((dropped / "compression.json").read_text())
    assert record["plan_digest"] in text and record["plan"]["calibration"]["sha256"] in text
    assert set(card.pictures) == {GRID} and card.pictures[GRID].startswith(b"\x89PNG") and f"]({GRID})" in text
    assert card_text(dropped, REPOSITORY) == card


def test_a_merge_and_a_correction_and_protection_are_told(tmp_path: Path) -> None:
    listed = tmp_path / "keep.json"
    listed.write_text('[{"layer": 1, "expert": 2}]')
    folder = make(tmp_path, "all", strategy="hc-smoe", correct="ridge", protect=str(listed), sequential=True)
    card = card_text(folder, REPOSITORY)
    plan = pruned(json.loads((folder / "compression.json").read_text())["plan"])
    text = body(card)
    assert set(ModelCard(card.text).data.tags) >= {"merged", "expert-merging"}
    assert "pruned" not in ModelCard(card.text).data.tags
    kept = sum(layer["figures"]["correction"]["kept"] != "none" for layer in plan["layers"])
    assert f"kept in {kept} of 4 layers" in text and "Nothing was fine-tuned end to end" in text
    rows = {name: row for name, row in table(card, "Experts").items() if name.isdigit()}
    for layer in plan["layers"]:
        figures = layer["figures"]["correction"]
        error = rows[str(layer["layer"])][-1]
        assert error.startswith(f"{figures['heldout_error_before']:.4g}")
        assert figures["kept"] == "none" or error.endswith(f"to {figures['heldout_error']:.4g} ({figures['kept']})")
        assert rows[str(layer["layer"])][4] == ("2" if layer["layer"] == 1 else "-")
    assert "    - layer: 1\n      expert: 2\n" in text and "compressed earlier layers" in text
    assert str(tmp_path) not in card.text and "keep.json" not in text


def test_the_gate_beside_the_weights_is_in_table_picture_and_metadata(copied: Path) -> None:
    result = about(copied, mixed())
    (copied / "gate.json").write_text(gate_json(result))
    card = card_text(copied, REPOSITORY)
    rows = table(card, "Before and after")
    assert rows["boolq"][:6] == ["acc", "500", "0.7500", "0.7460", "0.03", "+0.0040"]
    assert (rows["boolq"][7], rows["boolq"][-1]) == ("+0.0225", "pass")
    assert rows["rte"][-1] == rows["all together"][-1] == "fail" and rows["openbookqa"][-1] == "inconclusive"
    assert [rows["wikitext"][place] for place in (1, 5, 7, -1)] == ["62", "+0.50%", "+0.67%", "pass"]
    assert set(card.pictures) == {GRID}
    data = ModelCard(card.text).data
    assert data.eval_results == card_metrics(result) and data.model_name == "small-moe"
    assert mistakes(data.to_dict()) == []
    assert "Accuracy was measured on the tasks above and on nothing else." in body(card)
    assert "commit c0ffee" in body(card) and "Accuracy was not measured" not in card.text
    assert card_text(copied, REPOSITORY, result) == card


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("moved", [None, False, True])
@pytest.mark.parametrize("trained", [None, False, True])
def test_what_was_tuned_is_told_as_it_was(corrected: bool, moved: Any, trained: bool | None, copied: Path) -> None:
    """None: not asked for; False: tried, and nothing changed."""
    record = json.loads((copied / "compression.json").read_text())
    plan, text = record["plan"], record["plan"]["calibration"]
    curve = [{"step": step, "kl": 0.3 - step / 100, "loss": 2.0, "training": {}} for step in (0, 9)]
    if corrected:
        plan["steps"][0]["options"]["correct"] = {"method": "ridge"}
    if moved is not None:
        told: dict[str, Any] = {"before": 0.4, "after": 0.34 if moved else 0.4, "steps": []}
        plan["steps"].append({"name": "routers", "options": {}, "text": text, "result": told})
    if trained is not None:
        told = {"changed": trained, "before": 0.3, "after": 0.21, "best": 9, "curve": curve}
        plan["steps"].append({"name": "distill", "options": {"steps": 9}, "text": text, "result": told})
    record["plan_digest"] = Plan.from_dict(plan).digest()
    (copied / "compression.json").write_text(json.dumps(record))
    card = card_text(copied, REPOSITORY)
    said = " ".join(body(card).split())
    tuned = bool(moved or trained)
    assert ("Nothing was refitted or fine-tuned" in said) == (not corrected and not tuned)
    assert ("Nothing was fine-tuned end to end" in said) == (corrected and not tuned)
    assert ("errors before and after are those of single layers" in said) == corrected
    assert ("KL 0.4 to 0.34 nats" in said) == (moved is True)
    assert ("Router calibration moved the routers alone" in said) == (moved is True)
    assert ("KL 0.3 to 0.21 nats" in said) == ("Distillation trained the model end to end" in said) == (trained is True)
    assert ("KL 0.4 nats" in said, "KL 0.3 nats" in said) == (moved is False, trained is False)
    figures = [path for path in card.pictures if "distillation" in path]
    assert bool(figures) == (trained is not None) and all(f"]({path})" in said for path in figures)
    assert ("Text of the step routers" in said, "Text of the step distill" in said) == (
        moved is not None,
        trained is not None,
    )


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("polished", [False, True])
def test_of_a_step_unknown_here_nothing_is_denied(corrected: bool, polished: bool, copied: Path) -> None:
    """An option of a later release, and a step of a package that is not installed."""

    def later(record: dict[str, Any]) -> None:
        (step,) = record["plan"]["steps"]
        if polished:
            record["plan"]["steps"].append({"name": "polish", "options": {}, "result": {"strength": 3}})
        else:
            step["options"]["of_a_later_release"] = 1
        if corrected:
            step["options"]["correct"] = {"method": "ridge"}
        record["plan_digest"] = Plan.from_dict(record["plan"]).digest()

    said = " ".join(body(card_text(edited(copied, later), REPOSITORY)).split())
    assert "Nothing was" not in said and "A step is not installed" in said
    assert "- Strategy: count-guided" in said and f"- Reconstruction: {'method ridge' if corrected else 'none'}" in said
    assert ("errors before and after are those of single layers" in said) == corrected


class Polish(StepOptions):
    name: ClassVar[str] = "polish"


@pytest.mark.parametrize(
    ("result", "tuned", "ways"),
    [({"strength": 3}, "unknown", ["polish"]), (None, "unknown", ["polish"]), ({"changed": False}, "", [])],
)
def test_a_step_that_describes_nothing_may_have_tuned_the_model(result: Any, tuned: str, ways: list[str]) -> None:
    section = Step(Polish()).describe(PlannedStep("polish", {}, {"decided": 1}, result))
    assert (section.summary, section.tuned, section.ways) == ("polish", tuned, ways)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (None, "The weights are not quantised; they are stored as BF16"),
        ({"bits": 8}, "quantised as the base's are (no method is named), stored as BF16"),
        ({"quant_method": "fp8"}, "quantised as the base's are (fp8), stored as BF16"),
    ],
)
def test_a_quantisation_is_that_of_the_config(declared: Any, said: str, copied: Path) -> None:
    small.edit_json(copied / "config.json", lambda config: config.update(quantization_config=declared))
    told = " ".join(body(card_text(copied, REPOSITORY)).split())
    assert said in told and ("not quantised" in told) == (declared is None)


def test_a_copied_model_keeps_its_gate_and_a_changed_one_does_not(copied: Path, tmp_path: Path) -> None:
    result = about(copied, gate(task()))
    (copied / "gate.json").write_text(gate_json(result))
    again = shutil.copytree(copied, tmp_path / "again", copy_function=shutil.copyfile)  # other times of change
    assert "| pass |" in card_text(again, REPOSITORY).text
    config = json.loads((again / "config.json").read_text())
    (again / "config.json").write_text(json.dumps({**config, "rope_theta": 2.0}))
    assert "Accuracy was not measured" in card_text(again, REPOSITORY).text
    with pytest.raises(CompressionError, match=r"of another model than .*: config\.json is not the same"):
        card_text(again, REPOSITORY, result)
    (again / "gate.json").unlink()  # which would be found, for it is of the other folder's files
    (copied / "gate.json").write_text(gate_json(replace(result, compressed_identity={"repository": "a/b"})))
    assert "Accuracy was not measured" in card_text(copied, REPOSITORY).text


def test_no_name_does_harm(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "odd-token-in-use")

    def spoil(record: dict[str, Any]) -> None:
        plan = record["plan"]
        (step,) = plan["steps"]
        plan["source"]["model"], step["options"]["strategy"] = HOSTILE, ON_ONE_LINE
        step["options"]["options"] = {"x": HOSTILE}
        plan["calibration"]["sources"][0]["source"] = "```\n</details>" + HOSTILE + "odd-token-in-use"
        step["plan"]["layers"][0]["decided_by"] = "</details>" + HOSTILE
        record["plan_digest"] = Plan.from_dict(plan).digest()
        record["versions"] = {HOSTILE: HOSTILE}
        record["left_out"] = [HOSTILE]
        record["zeroed_fields"] = [HOSTILE]

    edited(copied, spoil)
    plain = table(card_text(copied, REPOSITORY), "Before and after")
    result = about(copied, gate(task(ON_ONE_LINE, metric=ON_ONE_LINE), base=f"/home/me/{HOSTILE}", compressed=HOSTILE))
    card = card_text(copied, REPOSITORY, result)
    page = html(card)
    tags = set(re.findall(r"</?([a-z]+\d?)[ >]", page))
    assert "script" not in tags and page.count("<details>") == page.count("</details>") == 2
    assert "<em>" not in page and "javascript:" not in "".join(re.findall('(?:href|src)="([^"]*)"', page))
    assert page.count("<img") == 1
    widths = {
        len(re.findall("<t[dh]", row)) for row in re.findall("<tr>.*?</tr>", page.split("</table>")[0], re.DOTALL)
    }
    assert widths == {6} and plain.keys() < table(card, "Before and after").keys()
    header = yaml.safe_load(card.text.split("---\n")[1])
    assert set(header) == {"library_name", "pipeline_tag", "tags", "model-index"} and len(header["tags"]) == 5
    assert TOKEN not in card.text and "hf_" not in card.text and "odd-token" not in card.text
    assert "\u202e" not in card.text and "/home" not in card.text
    assert ModelCard(card.text).content == card.text and mistakes(header) == []


def test_no_folder_of_this_machine_is_told(copied: Path, tmp_path: Path) -> None:
    command = f"moe-compress compress {DEMO} -o '{copied}' --calibration {tmp_path}/a.txt --experts 12"
    card = card_text(copied, REPOSITORY, command=command, base=tmp_path)
    assert "moe-compress compress checkpoint -o small --calibration a.txt --experts 12\n" in card.text
    for part in (*tmp_path.parts[1:], *DEMO.parts[1:-1], "secret folder"):
        assert not re.search(rf"{re.escape(part)}[/\\]", card.text)
    assert 'local checkpoint "checkpoint"' in card.text and "hf_hub" not in card.text
    with pytest.raises(CompressionError, match="no name of a repository"):
        card_text(copied, str(tmp_path))


def onnx(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(b"graph" * 100)
    (folder / "onnx_export.json").write_text(export_record())
    return folder


@pytest.mark.full
def test_stock_loading_is_offered_only_where_it_is_right(tmp_path: Path) -> None:
    for scheme, offered in (("nvfp4", False), ("fp8", True)):
        api.compress(str(DEMO), tmp_path / scheme, [Quantize(scheme=scheme)])
        told = body(card_text(tmp_path / scheme, REPOSITORY))
        assert ("AutoModelForCausalLM" in told) is offered
        assert ("experts wrongly" in told) is not offered
        assert "Quantised routed experts to" in told.partition("## ")[0] and "ordinary checkpoint" not in told
        assert "were quantised by the step quantize" in told and "as the base's are" not in told
        assert "MoE layers: 0" not in told and ("Servers round activations" in told) is (scheme == "fp8")


def test_metadata_name_the_format_and_the_relation(copied: Path, tmp_path: Path) -> None:
    """The Hub calls a quantisation what was rounded and otherwise not changed."""

    def card(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> dict[str, Any]:
        def to_hub(record: dict[str, Any]) -> None:
            plan = record["plan"]
            plan["source"] |= {"model": "org/base", "revision": "0" * 40}
            plan["steps"] = change(plan["steps"])
            record["plan_digest"] = Plan.from_dict(plan, "plan").digest()

        text = card_text(edited(copied, to_hub), REPOSITORY, base=tmp_path).text
        metadata: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
        assert mistakes(metadata) == []
        return metadata

    decided = {"format": "pack-quantized", "group_size": -1, "matrices": 1, "weights": 1, "bits": 4}
    decided["dequantized"] = False
    step = {"name": "quantize", "options": Quantize(scheme="int4").model_dump(mode="json"), "plan": decided}
    pruned_only = card(lambda steps: steps)
    packed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"]}}}
    small.edit_json(copied / "config.json", lambda config: config.update(quantization_config=packed))
    both = card(lambda steps: [*steps, step])
    alone = card(lambda steps: [step])
    assert pruned_only["base_model_relation"] == both["base_model_relation"] == "finetune"
    assert alone["base_model_relation"] == "quantized"
    assert {"compressed-tensors", "int4"} <= set(both["tags"]) & set(alone["tags"])
    assert not {"compressed-tensors", "int4"} & set(pruned_only["tags"])


def test_a_graph_beside_the_weights_is_offered_with_how_it_was_verified(copied: Path) -> None:
    onnx(copied / "onnx")
    card = card_text(copied, REPOSITORY)
    text = body(card)
    assert "onnx" in ModelCard(card.text).data.tags and ModelCard(card.text).data.library_name == "transformers"
    assert 'moe-compress generate model/onnx "Once' in text and 'InferenceSession("model/onnx/model.onnx")' in text
    assert "compared with: the stock model in float32" in text and "file: 500 B" in text
    assert "largest logit difference: 2.5e-05" in text and "greedy tokens: 63 of 64 the same" in text


def test_a_graph_alone_claims_no_safetensors(copied: Path) -> None:
    onnx(copied)
    (copied / "model.safetensors").unlink()
    card = card_text(copied, REPOSITORY)
    assert ModelCard(card.text).data.library_name == "onnx" and "There are no safetensors here" in card.text
    assert "vllm" not in card.text and "from_pretrained" not in card.text
    assert "active parameters" not in card.text and "moe-compress generate model " in card.text
    shutil.rmtree(copied / "onnx", ignore_errors=True)
    (copied / "model.onnx").unlink()
    with pytest.raises(CompressionError, match=r"neither model\.safetensors nor an export"):
        card_text(copied, REPOSITORY)


def test_a_record_that_does_not_belong_to_the_files_is_refused(copied: Path) -> None:
    record = (copied / "compression.json").read_text()
    edited(copied, lambda content: content["bytes"].update(after=7))
    with pytest.raises(CompressionError, match=r"says 7; they do not belong together"):
        card_text(copied, REPOSITORY)
    (copied / "compression.json").write_text(record)
    edited(copied, lambda content: content["plan"]["source"].update(fingerprint="0" * 64))
    with pytest.raises(CompressionError, match="plan_digest is not its plan's"):
        card_text(copied, REPOSITORY)
    (copied / "compression.json").write_text(record)
    edited(copied, lambda content: content.pop("bytes"))
    with pytest.raises(CompressionError, match="bytes is missing"):
        card_text(copied, REPOSITORY)
    with pytest.raises(CompressionError, match=r"has no compression\.json, so nothing is known"):
        card_text(DEMO, REPOSITORY)
