"""The table of a model card says what the plan says, and stays readable for the largest models."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from compressor.document.markdown import markdown
from compressor.formatting import joined, label, one_line, ranges, without_paths
from compressor.hub.card import experts_details
from compressor.model.moe_layer import MoeLayer
from compressor.recipe.plan import Group, LayerPlan, Source
from compressor.report.data import experts_table
from tests.support.plans import Decided


def group(members: list[int], scale: float = 1.0) -> Group:
    """These experts in equal parts."""
    shares = (1 / len(members),) * len(members)
    return Group(tuple(members), shares, shares, scale)


def moe_layer(index: int, experts: int) -> MoeLayer:
    name = f"model.layers.{index}.mlp"
    return MoeLayer(
        f"{name}.experts", name, f"{name}.gate", f"model.layers.{index}", index, experts, 2, 1, 1,
    )  # fmt: skip


def a_plan(layers: list[LayerPlan]) -> Decided:
    source = Source("model", None, "f" * 64)
    return Decided(source, len(layers[0].groups), "by-hand", {}, None, tuple(layers))


@st.composite
def layer_plans(draw: st.DrawFn, index: int, keep: int) -> LayerPlan:
    """A layer of up to 40 experts of which groups of any members stay; what is in no group is dropped."""
    experts = draw(st.integers(keep, 40))
    order = list(draw(st.permutations(range(experts))))
    cuts = sorted(draw(st.sets(st.integers(1, experts - 1), min_size=keep - 1, max_size=keep - 1)))
    pieces = [order[begin:end] for begin, end in zip([0, *cuts], [*cuts, experts], strict=True)]
    members = [piece[: draw(st.integers(1, len(piece)))] for piece in pieces]
    scales = [draw(st.sampled_from([1.0, 1.0, 0.5])) for _ in members]
    groups = [group(each, scale) for each, scale in zip(members, scales, strict=True)]
    return LayerPlan.of(moe_layer(index, experts), groups, decided_by=draw(st.text(max_size=12)))


@st.composite
def plans(draw: st.DrawFn) -> Decided:
    keep = draw(st.integers(2, 6))
    return a_plan([draw(layer_plans(index, keep)) for index in range(draw(st.integers(1, 4)))])


def read_ranges(text: str) -> list[int]:
    """'0-2,5' -> [0, 1, 2, 5]."""
    if text == "-":
        return []
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [number for each in ends for number in range(each[0], each[-1] + 1)]


@given(plans())
def test_the_table_parses_back_to_the_plan(plan: Decided) -> None:
    table = experts_table(plan)
    assert table.columns == ("layer", "experts", "kept", "merged", "dropped", "decided by")
    for layer, row in zip(plan.layers, table.rows, strict=True):
        number, counts, kept, merged, dropped, _ = map(str, row)
        assert counts == f"{layer.experts} → {len(layer.groups)}"
        changed = [] if merged == "-" else [[int(each) for each in part.split("+")] for part in merged.split(", ")]
        found = [([expert], True) for expert in read_ranges(kept)] + [(members, False) for members in changed]
        assert sorted(found) == sorted((sorted(each.members), each.untouched) for each in layer.groups)
        assert (int(number), read_ranges(dropped)) == (layer.layer, list(layer.dropped))


@given(st.sets(st.integers(0, 60)))
def test_ranges_are_as_short_as_runs(numbers: set[int]) -> None:
    text = ranges(numbers)
    assert read_ranges(text) == sorted(numbers)
    runs = sum(number - 1 not in numbers for number in numbers)
    assert text == "-" or text.count(",") == runs - 1


def largest(protect: int = 0) -> Decided:
    """64 layers of 256 experts that become 128: pairs of neighbours, and apart ones, merged."""
    members = [[number, 255 - number] for number in range(40)] + [[number] for number in range(40, 128)]
    layer_plan = [LayerPlan.of(moe_layer(index, 256), [group(each) for each in members]) for index in range(64)]
    plan = a_plan(layer_plan)
    return replace(plan, protected={layer.module: tuple(range(40, 40 + protect)) for layer in plan.layers})


def test_64_layers_of_256_experts_stay_readable() -> None:
    plan = largest(4)
    text = markdown(experts_details(plan))
    assert len(text.encode()) < 150_000
    assert all(f"| {index} | 256 → 128 | 40-127 | 0+255, 1+254" in text for index in range(64))
    assert text.count("| 128-215 |") == 64


def test_corrections_are_told_as_they_were_recorded() -> None:
    layers = list(largest().layers[:3])
    corrections = [
        {"kept": "tune", "heldout_error": 0.0145321, "heldout_error_before": 0.114467},
        {"kept": "none", "heldout_error": 0.2, "heldout_error_before": 0.2},
        {"kept": "none", "reason": "no calibration token reached the layer"},
    ]
    told = [replace(layer, figures={"correction": each}) for layer, each in zip(layers, corrections, strict=True)]
    table = experts_table(a_plan(told))
    assert table.columns[-1] == "held-out error"
    assert [row[-1] for row in table.rows] == ["0.1145 to 0.01453 (tune)", "0.2, not corrected", "-"]


def test_layers_with_several_modules_are_told_apart_by_name() -> None:
    first, second = largest().layers[:2]
    plan = a_plan([first, replace(second, layer=0)])
    assert [row[0] for row in experts_table(plan).rows] == [f"0 ({layer.module})" for layer in plan.layers]


def test_names_lose_their_folders_and_nothing_else() -> None:
    for name, expected in {
        "org/model": "org/model", "allenai/c4:en": "allenai/c4:en", "demo": "demo", "model": "model",
        "/home/me/models/mine": "mine", "/home/me/models/mine/": "mine", "~/texts": "texts", "../up/mine": "mine",
        "data/texts.jsonl#body": "texts.jsonl#body", "C:\\Users\\me\\texts.txt": "texts.txt", "file:///home/me/a": "a",
    }.items():  # fmt: skip
        assert label(name) == expected
    command = (
        "moe-compress compress /home/me/big -o ~/out/small --calibration data/private/a.txt=0.5 \\\n"
        "--calibration=/srv/b.jsonl=0.5 --calibration allenai/c4 --calibration d/c.parquet "
        "--protect '/home/my name/h.json' org/model\n"
        "moe-compress apply ../plan.json"
    )
    assert without_paths(command) == (
        "moe-compress compress big -o small --calibration a.txt=0.5 --calibration=b.jsonl=0.5 --calibration allenai/c4 "
        "--calibration c.parquet --protect h.json org/model\nmoe-compress apply plan.json"
    )
    assert "home" not in without_paths("moe-compress inspect /home/me/it 'without an end")


def test_words_are_joined_and_names_stay_on_one_line() -> None:
    assert [joined(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
    assert one_line("a\n\u202e|b\x00`c`") == "a |b `c`"
    assert len(one_line("y" * 10**6)) < 400
