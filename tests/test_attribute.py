import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor

from tests.support import small, zoo
from tests.support.command_line import Result, Run, captured, names, refused

pytestmark = pytest.mark.usefixtures("offline")

LAYERS, SENDER, HUB, READER = 4, 1, 6, 2
FILES = [
    "attribution.json", "attribution.md", "causal.png", "experts.png", "graph.graphml", "graph.json", "graph.png",
    "hubs.json", "influence.png", "scores.png",
]  # fmt: skip
SIZES = ("--samples", 12, "--sequence-length", 32)


@torch.no_grad()
def plant(model: torch.nn.Module) -> Tensor:
    """Let one expert write what the reader's router tells its first two experts apart by; returns that direction."""
    reader = model.model.layers[READER]  # type: ignore[union-attr,index]
    rows: Tensor = reader.mlp.gate.weight * reader.post_attention_layernorm.weight  # type: ignore[union-attr,operator]
    direction = torch.nn.functional.normalize(rows[0] - rows[1], dim=0)
    down: Tensor = model.model.layers[SENDER].mlp.experts.down_proj  # type: ignore[union-attr,index,assignment]
    down[HUB] = 30 * direction[:, None] * torch.randn(down.shape[-1], generator=torch.Generator().manual_seed(3))
    return direction


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    model = zoo.build("mixtral", vocab_size=small.VOCABULARY, num_hidden_layers=LAYERS)
    plant(model)
    model.save_pretrained(folder / "model")
    small.tokenizer().save_pretrained(folder / "model")
    small.text_file(folder)
    return folder


@pytest.fixture(scope="module")
def attributed(planted: Path) -> Result:
    return captured(
        "attribute", planted / "model", "--calibration", planted / "calibration.txt", *SIZES,
        "-o", planted / "attribution", "--keys", 2, "--top", 3, "--edges", "experts", "--edges-kept", 50,
    )  # fmt: skip


def test_the_planted_hub_heads_the_list(planted: Path, attributed: Result) -> None:
    assert attributed.status == 0, attributed.err
    assert names(planted / "attribution") == FILES
    hubs = json.loads((planted / "attribution" / "hubs.json").read_text())
    assert (hubs[0]["layer"], hubs[0]["expert"]) == (SENDER, HUB)
    assert hubs[0]["module"] == f"model.layers.{SENDER}.mlp.experts"
    assert hubs[0]["influence"] == max(hub["influence"] for hub in hubs)
    content = json.loads((planted / "attribution" / "attribution.json").read_text())
    experts = [sender for sender in content["senders"] if sender["kind"] == "expert"]
    top = max(experts, key=lambda sender: sender["total_rank_change"])
    assert (top["layer"], top["number"]) == (SENDER, HUB)
    assert hubs[0]["aarv"] == top["total_rank_change"]
    assert all(receiver["unexplained"] < 1e-4 for receiver in content["receivers"])
    assert f"L{SENDER} E{HUB}" in attributed.out


def test_the_strongest_heads_are_split_by_key(planted: Path, attributed: Result) -> None:
    content = json.loads((planted / "attribution" / "attribution.json").read_text())
    heads = [sender for sender in content["senders"] if sender["kind"] == "head"]
    strongest = sorted(heads, key=lambda sender: -sender["total_influence"])[:3]
    found = content["per_key"]
    assert {(each["layer"], each["head"]) for each in found} == {(each["layer"], each["number"]) for each in strongest}
    assert {each["sequence"] for each in found} == {0, 1}
    for each in found:
        assert len(each["tokens"]) == len(each["texts"]) == len(each["influence"]) == 32
        assert 0 <= each["own"] + each["previous"] <= 1 + 1e-6 and 0 < each["first"] <= 1
    assert "## By key token" in (planted / "attribution" / "attribution.md").read_text()


def test_the_graph_opens_and_adds_up(planted: Path, attributed: Result) -> None:
    graph = nx.read_graphml(planted / "attribution" / "graph.graphml")
    content = json.loads((planted / "attribution" / "attribution.json").read_text())
    by_name = {(sender["module"], sender["number"]): sender for sender in content["senders"]}
    assert graph.number_of_nodes() == content["graph"]["nodes"] and graph.number_of_edges() == content["graph"]["edges"]
    for number, receiver in enumerate(content["receivers"]):
        edges = list(graph.in_edges(f"L{receiver['layer']} router", data=True))
        assert sum(data["covariance"] for *_, data in edges) == pytest.approx(receiver["variance"], rel=1e-4)
        for start, _, data in edges:
            node = graph.nodes[start]
            reported = by_name[node["module"], node.get("number")]
            assert data["influence"] == pytest.approx(reported["influence"][number], rel=5e-6)
            change = reported["rank_change"][number]
            assert data.get("aarv") == (None if change is None else pytest.approx(change, rel=5e-6))
    assert sum(data["kind"] == "scores" for *_, data in graph.edges(data=True)) == 50
    hub = f"L{SENDER} E{HUB}"
    assert all(content["graph"]["first"][name][0] == hub for name in ("influence", "AARV", "out-degree", "PageRank"))
    text = (planted / "attribution" / "attribution.md").read_text()
    assert "## The routing graph" in text and f"| {hub} |" in text


def test_without_an_output_it_only_shows(run: Run, planted: Path, tmp_path: Path) -> None:
    before = names(planted)
    result = run(
        "attribute", planted / "model", "--calibration", planted / "calibration.txt", *SIZES, "--json",
        "--threshold", 1e6,
    )  # fmt: skip
    assert result.status == 0, result.err
    content = json.loads(result.out)
    keys = ["model", "tokens", "hubs", "super_experts", "overlap", "receivers", "kinds", "seconds", "written"]
    assert list(content) == keys and content["hubs"] == [] and content["written"] == []
    assert content["tokens"] == 12 * 32
    assert names(planted) == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--top", 0), "--top"),
        (("--threshold", -1), "--threshold"),
        (("--keys", -1), "--keys"),
        (("--edges", "heads"), "'heads' is not one of 'routers', 'experts'"),
        (("--edges-kept", 0), "--edges-kept"),
        (("--without", "E3", *SIZES), "--without 'E3' names no expert; write layer and number, as in L1E9,L4E14"),
        (("--without", "L0E3, L0E99", *SIZES), "there is no such expert"),
        (("--without", ",".join(f"L1E{expert}" for expert in range(7)), *SIZES), "fewer than the top-k"),
        (("--samples", 0), "samples should be .*, it is 0"),
        (("--calibration", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_bad_options_are_refused(run: Run, planted: Path, tmp_path: Path, more: Any, message: str) -> None:
    data = () if "--calibration" in more else ("--calibration", planted / "calibration.txt")
    refused(run("attribute", planted / "model", "-o", tmp_path / "out", *data, *more), message)
    assert names(tmp_path) == []


def test_an_existing_folder_is_refused_before_anything_is_read(run: Run, planted: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    refused(run("attribute", tmp_path / "no-model", "-o", tmp_path / "out"), "out")
    refused(run("attribute", tmp_path / "no-model", "-o", tmp_path / "out", "--overwrite"), "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


def test_an_architecture_without_such_a_sum_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    small.save(tmp_path / "model", "zaya")
    small.text_file(tmp_path)
    data = ("--calibration", tmp_path / "calibration.txt", *SIZES)
    result = run("attribute", tmp_path / "model", "-o", tmp_path / "out", *data, "--json")
    refused(result, "ZayaForCausalLM cannot be attributed: model.layers.0: its router's logits are not linear")
    assert "out" not in names(tmp_path)
