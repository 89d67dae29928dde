"""Plans: JSON there and back, what groups mean, and one clear refusal for each way to edit a plan into nonsense."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.recipe.plan import Group, LayerPlan, Source, check_layers, check_source
from compressor.recipe.steps_plan import Plan, PlannedStep
from compressor.records import readable_json
from tests.support.plans import Decided, by_hand, pruned

FINGERPRINT = "f" * 64


def moe_layer(index: int = 0, experts: int = 8, top_k: int = 2, groups: int = 1) -> MoeLayer:
    name = f"model.layers.{index}.mlp"
    return MoeLayer(
        f"{name}.experts", name, f"{name}.gate", f"model.layers.{index}", index, experts, top_k, groups, groups,
    )  # fmt: skip


def a_stage(*layers: LayerPlan, **more: Any) -> Decided:
    chosen = layers or tuple(LayerPlan.keep(moe_layer(index), [0, 2, 5, 7]) for index in range(2))
    fields = {"calibration": None, **more}
    return Decided(
        Source("folder", None, FINGERPRINT), len(chosen[0].groups), "by-hand", {}, layers=tuple(chosen), **fields
    )


def a_plan(*layers: LayerPlan, **more: Any) -> Plan:
    return by_hand(a_stage(*layers, **more))


@pytest.mark.parametrize("calibration", [None, {"source": "żółć\n\u2028", "tokens": 9}])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_json_there_and_back(calibration: Any, scale: float) -> None:
    merged = [Group((0, 3), (1 / 3, 2 / 3), (0.1, 0.9), scale, 3), Group.single(2)]
    layers = (
        LayerPlan.of(moe_layer(0), merged, decided_by='a "text"', figures={"loss": 0.1, "": 1e-300}),
        LayerPlan.keep(moe_layer(4, experts=12), [11, 7]),
    )
    stage = a_stage(*layers, calibration=calibration, seed=2**63 - 1, protected={layers[0].module: (2,)})
    plan = by_hand(stage)
    plan = replace(plan, steps=(*plan.steps, PlannedStep("distill", {"steps": 3}, result={"before": 2})))
    again = Plan.from_dict(json.loads(plan.to_json()))
    assert again == plan and again.expert_plan == stage.expert_plan
    assert again.digest() == plan.digest() and again.to_json() == plan.to_json()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_readable_json_is_the_same_json(content: dict[str, Any]) -> None:
    assert json.loads(readable_json(content)) == content


def test_lists_of_plain_values_stand_on_one_line_and_text_is_left_alone() -> None:
    content = {"members": (0, 2, 5), "text": "[ x ]", "empty": [], "more": [["[\n 1 ]", None], {"a": {}}], 7: True}
    assert readable_json(content) == (
        '{\n  "members": [0, 2, 5],\n  "text": "[ x ]",\n  "empty": [],\n  "more": [\n    ["[\\n 1 ]", null],\n'
        '    {\n      "a": {}\n    }\n  ],\n  "7": true\n}\n'
    )


def test_digest_is_about_source_options_groups_and_tokens() -> None:
    plan = a_plan()
    assert replace(plan, versions={"torch": "0"}).digest() == plan.digest()
    assert (
        a_plan(*(LayerPlan.keep(moe_layer(i), [0, 2, 5, 7], decided_by="x") for i in range(2))).digest()
        == plan.digest()
    )
    assert a_plan(*(LayerPlan.keep(moe_layer(i), [0, 2, 5, 6]) for i in range(2))).digest() != plan.digest()
    assert replace(plan, source=Source("other", None, FINGERPRINT)).digest() == plan.digest()
    assert replace(plan, source=Source("folder", None, "0" * 64)).digest() != plan.digest()
    assert plan.with_entry(0, options={"strategy": "other"}).digest() != plan.digest()
    assert plan.with_entry(0, result={"gain": 1}).digest() == plan.digest()
    data = {"source": "a.txt", "sha256": "0" * 64, "heldout": 0.125}
    plan = a_plan(correction={"method": "ridge"}, calibration=data)
    assert replace(plan, calibration={**data, "source": "b.txt"}).digest() == plan.digest() != a_plan().digest()
    others: list[dict[str, Any]] = [{"sha256": "1" * 64}, {"heldout": 0.25}]
    for other in others:
        assert replace(plan, calibration={**data, **other}).digest() != plan.digest()
    assert replace(plan, seed=5).digest() != plan.digest()
    assert plan.with_entry(0, options={"correct": {"method": "tune"}}).digest() != plan.digest()
    own = plan.with_entry(0, text={"sha256": "2" * 64, "source": "c.txt"})
    assert own.digest() != plan.digest() and own.with_entry(0, text={"sha256": "2" * 64}).digest() == own.digest()


def first_layer(content: dict[str, Any]) -> Any:
    return pruned(content)["layers"][0]


def first_group(content: dict[str, Any]) -> Any:
    return first_layer(content)["groups"][0]


Edit = Callable[[dict[str, Any]], Any]
LAYER = "model.layers.0.mlp.experts"


def group(**changes: Any) -> Edit:
    return lambda content: first_group(content).update(changes)


def layer(**changes: Any) -> Edit:
    return lambda content: first_layer(content).update(changes)


def decided(**changes: Any) -> Edit:
    return lambda content: pruned(content).update(changes)


def whole(**changes: Any) -> Edit:
    return lambda content: content.update(changes)


EDITS: dict[str, tuple[Edit, str]] = {
    "another format": (whole(format="moe-compressor-plan/9"), "format is 'moe-compressor-plan/9'"),
    "no format": (lambda c: c.pop("format"), "format is None"),
    "no layers": (lambda c: pruned(c).pop("layers"), "the plan of prune.layers is missing"),
    "no members": (lambda c: first_group(c).pop("members"), r"experts: groups\[0\]\.members is missing"),
    "unknown field": (whole(exprets=4), "unknown field 'exprets'"),
    "unknown group field": (group(weight=1), r"groups\[0\] has an unknown field 'weight'"),
    "expert in two groups": (
        group(members=[0, 2], coefficients=[0.5, 0.5], router_coefficients=[0.5, 0.5]),
        "layers.0.mlp.experts: expert 2 is in two groups",
    ),
    "no such expert": (group(members=[8]), "expert 8 does not exist.*numbered 0 to 7"),
    "expert true": (group(members=[True]), r"members\[0\] should be a whole number, it is True"),
    "empty group": (group(members=[], coefficients=[], router_coefficients=[]), "must sum to 1|no members"),
    "sum above 1": (group(coefficients=[1.1]), r"coefficients that sum to 1\.1; they must"),
    "router sum": (group(router_coefficients=[0.5]), "router_coefficients that sum to 0.5"),
    "coefficient NaN": (group(coefficients=[float("nan")]), "should be a number, it is nan"),
    "coefficients too many": (group(coefficients=[0.5, 0.5]), "2 coefficients for 1 members"),
    "scale zero": (group(scale=0), "scale 0.0; it must be a positive number"),
    "head no member": (group(head=3), r"group \[0\] has head 3, which is none of its"),
    "scale of nothing": (group(scale=1e-300), "scale 1e-300; it must be .* float32 holds"),
    "groups missing": (
        lambda c: first_layer(c).update(groups=first_layer(c)["groups"][:3], dropped=[]),
        "3 groups, but the plan keeps 4 experts in every layer",
    ),
    "count edited": (decided(experts=5), "4 groups, but the plan keeps 5"),
    "dropped and kept": (lambda c: first_layer(c)["dropped"].append(0), "'dropped' names expert 0, .* take it out"),
    "dropped nobody": (lambda c: first_layer(c)["dropped"].append(42), "'dropped' names expert 42, .* take it out"),
    "layer twice": (lambda c: pruned(c)["layers"].append(first_layer(c)), "layers.0.mlp.experts appears twice"),
    "layers a text": (decided(layers="all"), "layers should be a list"),
    "group a list": (layer(groups=[[0, 1]]), r"groups\[0\] should be an object, it is \[0, 1\]"),
    "source text": (whole(source="here"), "source should be an object, it is 'here'"),
    "calibration empty": (whole(calibration={}), "calibration should name its source"),
    "experts without end": (layer(experts=10**12), "experts are more than any layer has"),
    "step a text": (whole(steps=["prune"]), r"steps\[0\] should be an object, it is 'prune'"),
    "unknown decision": (decided(layer=[]), "the plan of prune has an unknown field 'layer'"),
    "protected in no layer": (
        decided(protected={LAYER.replace("0", "9"): [0]}),
        r"names model\.layers\.9.*the plan does not have",
    ),
    "protected beyond": (decided(protected={LAYER: [8]}), "expert 8 is protected, but is not kept as it is"),
    "protected a list": (decided(protected=[2]), "protected should be an object"),
    "protected and scaled": (
        lambda c: (decided(protected={LAYER: [0]})(c), group(scale=0.5)(c)),
        "expert 0 is protected, but is not kept as it is",
    ),
    "protected and gone": (
        decided(protected={LAYER: [0, 4]}),
        "expert 4 is protected, but is not kept as it is; give it an untouch",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_impossible_edit_is_refused(name: str, tmp_path: Path) -> None:
    edit, message = EDITS[name]
    path = tmp_path / "plan.json"
    path.write_text(a_plan().to_json())
    path.write_text(edited(path, edit))
    with pytest.raises(CompressionError, match=message) as fault:
        Plan.load(path)
    assert "\n" not in str(fault.value)


def edited(path: Path, edit: Edit) -> str:
    content = json.loads(path.read_text())
    edit(content)
    return json.dumps(content)


def test_dropped_may_be_left_out_or_say_less() -> None:
    content = json.loads(a_plan().to_json())
    for given_list in (None, [], [1]):
        first_layer(content)["dropped"] = given_list
        assert Plan.from_dict(content).expert_plan == a_stage().expert_plan
    del first_layer(content)["dropped"]
    assert Plan.from_dict(content).expert_plan == a_stage().expert_plan


def test_a_dropped_expert_may_be_moved_into_a_group() -> None:
    content = json.loads(a_plan().to_json())
    first_group(content).update(members=[0, 1], coefficients=[0.75, 0.25], router_coefficients=[1, 0])
    with pytest.raises(CompressionError, match="'dropped' names expert 1,"):
        Plan.from_dict(content)
    first_layer(content)["dropped"].remove(1)
    plan = Plan.from_dict(content).expert_plan
    assert plan.layers[0].dropped == (3, 4, 6)
    assert plan.layers[0].slots() == {0: 0, 1: 0, 2: 1, 5: 2, 7: 3}


def test_router_coefficients_follow_the_others_if_left_out() -> None:
    content = json.loads(a_plan().to_json())
    del first_group(content)["router_coefficients"]
    assert Plan.from_dict(content).expert_plan == a_stage().expert_plan


def test_routing_groups_must_stay_equal_whole_and_in_order() -> None:
    layer = moe_layer(groups=2)
    assert len(LayerPlan.keep(layer, [0, 1, 4, 6]).groups) == 4
    with pytest.raises(CompressionError, match=r"group \[2\] has a place of routing group 1; keep equally many"):
        LayerPlan.keep(layer, [0, 1, 2, 4])
    with pytest.raises(CompressionError, match="3 experts do not divide into its 2 routing groups"):
        LayerPlan.keep(layer, [0, 1, 4])
    with pytest.raises(CompressionError, match=r"group \[0, 5\] has a place of routing group 0"):
        LayerPlan.of(layer, [Group((0, 5), (0.5, 0.5), (0.5, 0.5)), Group.single(4)])
    whole = LayerPlan.keep(layer, [0, 1, 4, 6])
    with pytest.raises(CompressionError, match="in order, and mix none"):
        replace(whole, groups=whole.groups[::-1])


def test_another_models_plan_is_refused() -> None:
    layers = [moe_layer(0), moe_layer(1)]
    plan = a_stage()
    check_layers(plan, layers)
    with pytest.raises(CompressionError, match="made for another model: its source fingerprint ffffffffffff differs"):
        check_source(plan.source, "0" * 64)
    with pytest.raises(
        CompressionError, match=r"speaks of model\.layers\.1\.mlp.experts, which this model does not have"
    ):
        check_layers(plan, layers[:1])
    with pytest.raises(CompressionError, match=r"has no entry for model\.layers\.2\.mlp\.experts"):
        check_layers(plan, [*layers, moe_layer(2)])
    with pytest.raises(CompressionError, match="the plan says top_k 2, the model has 3; restore it"):
        check_layers(plan, [moe_layer(0, top_k=3), moe_layer(1)])
    with pytest.raises(CompressionError, match="the plan says experts 8, the model has 16"):
        check_layers(plan, [moe_layer(0, experts=16), moe_layer(1)])


def test_a_head_is_written_where_there_is_one_and_counts_for_the_digest() -> None:
    def with_head(head: int | None) -> Plan:
        return a_plan(LayerPlan.of(moe_layer(), [Group((0, 1), (0.5, 0.5), (1.0, 0.0), head=head), Group.single(2)]))

    written = first_layer(with_head(1).to_dict())["groups"]
    assert written[0]["head"] == 1 and "head" not in written[1]
    assert "head" not in first_group(with_head(None).to_dict())
    assert Plan.from_dict(json.loads(with_head(1).to_json())).expert_plan.layers[0].groups[0].head == 1
    assert len({with_head(head).digest() for head in (None, 0, 1)}) == 3


def test_protected_experts_are_written_where_there_are_some() -> None:
    guarded = a_plan(protected={"model.layers.1.mlp.experts": (0, 7)})
    assert "protected" not in pruned(a_plan().to_dict())
    content = json.loads(guarded.to_json())
    assert pruned(content)["protected"] == {"model.layers.1.mlp.experts": [0, 7]}
    assert Plan.from_dict(content) == guarded
    pruned(content)["protected"] = {"model.layers.1.mlp.experts": [7, 0]}
    assert Plan.from_dict(content).expert_plan.layers == guarded.expert_plan.layers
    pruned(content)["protected"] = {}
    assert Plan.from_dict(content).expert_plan == a_stage().expert_plan
