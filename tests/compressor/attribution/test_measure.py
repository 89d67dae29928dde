from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import PreTrainedModel

from compressor.attribution import routers
from compressor.attribution.figures import Attribution, Sender, router_labels
from compressor.attribution.graph import routing_graph
from compressor.attribution.hubs import find_hubs, super_experts
from compressor.attribution.measure import attribute
from compressor.attribution.routers import Selection, find_selection
from compressor.attribution.tracing import parts_of
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.architecture import discover
from compressor.model.moe_layer import layers_by_decoder_layer
from compressor.model.opened import OpenModel, open_model
from compressor.model.router_logits import SCORES, Score
from compressor.progress import Silent
from tests.support import surgery_reference, zoo
from tests.support.opened_models import batches, calibration, opened

NO_STREAM = "its layers do not add to one residual stream"
NOT_LINEAR = "its router's logits are not linear in the normalised residual stream"
REFUSED = {
    "axk2": NOT_LINEAR,
    "deepseek_v4": NO_STREAM,
    "diffusion_gemma": "shares its experts with another layer",
    "glm5_next": NO_STREAM,
    "hy_v4": NOT_LINEAR,
    "hy_v4_vl": NOT_LINEAR,
    "inkling": "its experts' outputs do not reach the residual stream token by token",
    "inkling2": NO_STREAM,
    "inkling2_loop": NO_STREAM,
    "qwen4_exp": NO_STREAM,
    "zaya": NOT_LINEAR,
}
PARALLEL = {"cohere2_moe"}  # its attention runs beside the experts
TOLERANCE = 1e-4


def run(model: OpenModel, parts: Sequence[Tensor]) -> Attribution:
    return attribute(model, calibration(parts), Silent())


def mean_scores(sender: Sender) -> list[float | None]:
    """Mean sub-score over experts and tokens by receiver: linear in the component, as APS and ANS are not."""
    pairs = zip(sender.positive, sender.negative, strict=True)
    return [None if positive is None or negative is None else positive + negative for positive, negative in pairs]


def add_up(senders: Sequence[Sender], receivers: int) -> list[float]:
    rows = [mean_scores(sender) for sender in senders]
    return [sum(row[number] or 0.0 for row in rows) for number in range(receivers)]


def known(row: Sequence[float | None]) -> dict[int, float]:
    return {number: value for number, value in enumerate(row) if value is not None}


def same(first: Attribution, second: Attribution, rel: float = 1e-4, ranks: float = 1e-9) -> None:
    assert [sender.name for sender in first.senders] == [sender.name for sender in second.senders]
    for one, other in zip(first.senders, second.senders, strict=True):
        assert one.share == pytest.approx(other.share)
        for row in ("influence", "positive", "negative"):
            assert known(getattr(one, row)) == pytest.approx(known(getattr(other, row)), rel=rel, abs=1e-6), one.name
        assert known(one.rank_change) == pytest.approx(known(other.rank_change), abs=ranks), one.name
    for mine, theirs in zip(first.outputs, second.outputs, strict=True):
        assert (mine.tokens, mine.expert) == (theirs.tokens, theirs.expert)
        assert mine.mean_norm == pytest.approx(theirs.mean_norm, rel=1e-4)
        assert mine.max_entry == pytest.approx(theirs.max_entry, rel=1e-4)


@pytest.mark.parametrize("name", zoo.sweep(but=REFUSED))
def test_sub_scores_add_to_the_logits_of_every_family(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    found = run(model, batches(stock))
    texts = [layer.name for layer in model.architecture.layers if "vision_moe" not in layer.name]  # ernie's see no text
    assert [receiver.module for receiver in found.receivers] == texts
    assert max(receiver.unexplained for receiver in found.receivers) <= TOLERANCE
    assert found.tokens == 36 and len(found.outputs) == len(model.architecture.layers) * model.architecture.experts
    moe = add_up(found.of_kind("moe"), len(found.receivers))
    assert moe == pytest.approx(add_up(found.of_kind("expert", "shared"), len(found.receivers)), rel=1e-4, abs=1e-5)
    graph = routing_graph(found)  # of heads and their bias in place of attentions
    for label, receiver in zip(router_labels(found.receivers), found.receivers, strict=True):
        edges = [data for *_, data in graph.in_edges(label, data=True)]
        assert sum(data["covariance"] for data in edges) == pytest.approx(receiver.variance, rel=1e-4)
    for sender in found.senders:
        unknown = [value is None for value in sender.influence]
        if sender.layer is not None and sender.kind != "other":  # a bias of a router reaches that router alone
            beside = sender.kind in ("moe", "expert", "shared") or name in PARALLEL
            earliest = sender.layer + beside
            assert unknown == [receiver.layer < earliest for receiver in found.receivers], sender.name
        assert [value is None for value in sender.positive] == unknown


@pytest.mark.parametrize("name", zoo.sweep(but={*REFUSED, "deepseek_v3-n_group4"}))  # whose groups can spare none
def test_blocking_is_removing(name: str, tmp_path: Path) -> None:
    """Tokens, outputs and rank changes are those of the stock model that never had the blocked experts."""
    stock, model = opened(name, tmp_path / "whole")
    layers = model.architecture.layers
    size = model.architecture.experts // layers[0].routing_groups  # one goes of each group
    rest = [expert for expert in range(model.architecture.experts) if expert % size != 1]
    group = {"coefficients": [1.0], "router_coefficients": [1.0]}
    planned = [
        {"module": layer.name, "experts": layer.experts, "groups": [{"members": [kept], **group} for kept in rest]}
        for layer in layers
    ]
    count_field = zoo.family(name).count_field
    smaller = surgery_reference.cut(stock, count_field, {"experts": len(rest), "layers": planned})
    expected = run(saved(smaller, tmp_path / "smaller"), batches(stock))
    labels = {f"L{layer.index}E{expert}" for layer in layers for expert in {*range(layer.experts)} - {*rest}}
    found = attribute(model, calibration(batches(stock)), Silent(), without=sorted(labels))
    blocked = [sender for sender in found.of_kind("expert") if sender.number not in rest]
    assert {sender.share for sender in blocked} == {0.0} and len(blocked) == len(layers) * (
        layers[0].experts - len(rest)
    )
    others = [sender for sender in found.senders if sender not in blocked]
    for mine, theirs in zip(others, expected.senders, strict=True):
        assert mine.share == pytest.approx(theirs.share), mine.name
        assert known(mine.rank_change) == pytest.approx(known(theirs.rank_change), abs=1e-6), mine.name
    outputs = [output for output in found.outputs if output.expert in rest]
    for sizes, theirs in zip(outputs, expected.outputs, strict=True):
        assert sizes.tokens == theirs.tokens
        assert sizes.mean_norm == pytest.approx(theirs.mean_norm, rel=1e-4)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & zoo.FAMILIES.keys()))
def test_families_without_a_residual_stream_are_refused(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    with pytest.raises(CompressionError) as caught:
        run(model, batches(stock))
    assert REFUSED[name] in str(caught.value)
    assert name == "diffusion_gemma" or model.architecture.model_class in str(caught.value)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_edges_to_experts_add_to_the_edge_to_their_router(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    found = attribute(model, calibration(parts), Silent(), edges_kept=100_000)
    for sender in found.parts():
        for number, influence in known(sender.influence).items():
            own = [e.influence for e in found.score_edges if (e.sender, e.receiver) == (sender.name, number)]
            assert len(own) == (model.architecture.experts if influence else 0) or 0 < influence < 1e-12
            assert sum(own) == pytest.approx(influence, rel=1e-5)
    named = {sender.name for sender in found.parts()}
    assert {edge.sender for edge in found.score_edges} <= named
    few = attribute(model, calibration(parts), Silent(), edges_kept=20)
    assert few.score_edges == found.score_edges[:20]
    same(few, found)
    graph = routing_graph(few)
    kept = [data["influence"] for *_, data in graph.edges(data=True) if data["kind"] == "scores"]
    assert sorted(kept, reverse=True) == [edge.influence for edge in few.score_edges]


@pytest.mark.parametrize("at_once", [1, 8 * 12 * 2, 8 * 24 * 2])
def test_few_scores_at_once_change_nothing(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with batches of unlike sizes, which hold unlike numbers of routers at once."""
    model = zoo.build("mixtral", num_hidden_layers=4)
    source, parts = saved(model, tmp_path), batches(model, (2, 1))
    whole = run(source, parts)
    monkeypatch.setattr(routers, "SCORES_AT_ONCE", at_once)
    same(run(source, parts), whole)


@pytest.mark.parametrize("name", ["mixtral", "nemotron_h", "beam"])
def test_batches_of_one_token(name: str, tmp_path: Path) -> None:
    """A norm's factor of a single token is that token's own, and one token does not tell what routers rank by."""
    stock, model = opened(name, tmp_path)
    ids = zoo.tokens(stock, 12, 1)
    single = run(model, ids.split(1))
    same(single, run(model, (ids,)), ranks=0.01)
    same(run(model, (ids[:3], ids[3:4], ids[4:])), single, ranks=0.01)


def saved(stock: PreTrainedModel, folder: Path) -> OpenModel:
    stock.save_pretrained(folder)
    return open_model(locate(str(folder)), "float32", "cpu")


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gemma4", "minimax"])
def test_bfloat16_leaves_little_unexplained(name: str, tmp_path: Path) -> None:
    stock = zoo.build(name).bfloat16()
    stock.save_pretrained(tmp_path)
    found = run(open_model(locate(str(tmp_path)), "bfloat16", "cpu"), batches(stock))
    assert 1e-4 < max(receiver.unexplained for receiver in found.receivers) < 0.05


def test_an_expert_that_no_token_visits_has_no_influence(tmp_path: Path) -> None:
    stock = zoo.build("gpt_oss")
    with torch.no_grad():
        for layer in stock.model.layers:
            layer.mlp.router.bias[3] = -1e4
    found = run(saved(stock, tmp_path), batches(stock))
    idle = [sender for sender in found.of_kind("expert") if sender.number == 3]
    assert [sender.layer for sender in idle] == [0, 1]
    for sender in idle:
        assert sender.share == 0 and sender.total_influence == 0 and sender.total_rank_change == 0
    assert idle[0].influence == (None, 0.0)
    assert [(output.tokens, output.mean_norm) for output in found.outputs if output.expert == 3] == [(0, 0.0)] * 2
    shares = sum(sender.share for sender in found.of_kind("expert") if sender.layer == 0)
    assert shares == pytest.approx(stock.config.num_experts_per_tok)


def unread(model: Any, layers: Sequence[int]) -> Tensor:
    """[H]: a unit vector that no router of these layers reads."""
    blocks = [model.model.layers[layer] for layer in layers]
    rows = torch.cat([block.mlp.gate.weight * block.post_attention_layernorm.weight for block in blocks])
    return torch.linalg.svd(rows.double(), full_matrices=True).Vh[len(rows)].float()


@pytest.mark.parametrize(("name", "layer", "sizes"), [("mixtral", 3, {"num_local_experts": 16}), ("qwen2_moe", 2, {})])
def test_a_massive_expert_that_no_router_reads_is_no_hub(name: str, layer: int, sizes: Any, tmp_path: Path) -> None:
    model = zoo.build(name, num_hidden_layers=5, **sizes)
    with torch.no_grad():
        down = model.model.layers[layer].mlp.experts.down_proj
        mixed = torch.randn(down.shape[-1], generator=torch.Generator().manual_seed(1))
        down[5] = 20 * torch.outer(unread(model, range(layer + 1, 5)), mixed)
    found = run(saved(model, tmp_path), batches(model, (4, 2), 16))
    assert [(each.layer, each.expert) for each in super_experts(found)] == [(layer, 5)]
    assert not any((hub.layer, hub.expert) == (layer, 5) for hub in find_hubs(found))
    beside = {each.number: each for each in found.of_kind("expert") if each.layer == layer}
    massive = beside.pop(5)
    assert massive.share > 0 and massive.total_rank_change == 0
    assert massive.total_influence < 1e-3 * min(each.total_influence for each in beside.values())


def kinds(name: str, decoder_layer: int) -> dict[str, str]:
    model = zoo.skeleton(name)
    architecture = discover(model.config, model)
    full = architecture.decoder_layers[decoder_layer]
    own = layers_by_decoder_layer(architecture.layers).get(full, ())
    found = parts_of(full, model.get_submodule(full), own)
    return {part.removeprefix(f"{full}."): kind for part, kind in found.items()}


@pytest.mark.parametrize(
    ("name", "decoder_layer", "expected"),
    [
        ("mixtral", 0, {"self_attn": "attention", "mlp.experts": "expert"}),
        ("deepseek_v3", 0, {"self_attn": "attention", "mlp": "mlp"}),
        ("deepseek_v3", 1, {"self_attn": "attention", "mlp.experts": "expert", "mlp.shared_experts": "shared"}),
        ("gemma4", 0, {"self_attn": "attention", "mlp": "shared", "experts": "expert"}),
        ("nemotron_h", 0, {"mixer": "attention"}),  # a state-space mixer
        ("nemotron_h", 1, {"mixer.experts": "expert", "mixer.shared_experts": "shared"}),
        ("nemotron_h", 3, {"mixer": "mlp"}),
        ("jamba", 0, {"mamba": "attention", "feed_forward": "mlp"}),
        ("qwen3_next", 1, {"linear_attn": "attention", "mlp.experts": "expert", "mlp.shared_expert": "shared"}),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_parts_are_what_writes_to_the_stream(name: str, decoder_layer: int, expected: dict[str, str]) -> None:
    assert kinds(name, decoder_layer) == expected


ACTIVATIONS: dict[Score | None, Callable[[Tensor], Tensor]] = {
    None: lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt-softplus": lambda logits: softplus(logits).sqrt(),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_routers_own_way_to_rank_is_found(activation: Score | None) -> None:
    logits = 2 * normal(200, 2, 8)
    bias, decoy = normal(2, 8, seed=1), normal(2, 8, seed=2)
    scale = {None: 1.0, "sigmoid": 0.5, "softmax": 0.3, "sqrt-softplus": 1.0}[activation]
    chosen = (ACTIVATIONS[activation](logits) + scale * bias).topk(2).indices
    tried = [Selection(score, added) for added in (decoy, scale * bias) for score in (None, *SCORES)]
    found = find_selection([Selection(), *tried], [(logits, chosen)], torch.ones(2, 2, dtype=torch.bool), (1, 1))
    assert found.score == activation
    assert found.bias is not None and torch.equal(found.bias, scale * bias)
