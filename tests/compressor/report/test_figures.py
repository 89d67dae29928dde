"""A report's figures: what is drawn, on the page and in the PNG, and what their text alternatives say."""

import base64
import io
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib import colormaps
from PIL import Image

from compressor.report.bars import phases, visit_alt
from compressor.report.data import ReportData
from compressor.report.drawing import Picture, colours, png
from compressor.report.figures import NAMES, pictures
from compressor.report.layers import fates, listed, named, order
from compressor.report.matrices import LEVELS, limits, matrix_alt
from tests.gates import gates
from tests.reported import HOSTILE, bare, hostile, layer, report

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn() -> dict[str, Picture]:
    return by_name(report())


def by_name(data: ReportData) -> dict[str, Picture]:
    return {picture.name: picture for picture in pictures(data)}


def elements(picture: Picture) -> list[ElementTree.Element]:
    """The picture's SVG elements, which must be well-formed."""
    return list(ElementTree.fromstring(f"<all>{picture.svg}</all>"))


def pixels(svg: ElementTree.Element) -> np.ndarray:
    """The image in a drawing, RGB [rows, columns, 3]."""
    (image,) = svg.iter(f"{SVG}image")
    content = base64.b64decode(image.attrib["href"].removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?", text)]


def test_all_figures_are_there_with_words(drawn: dict[str, Picture]) -> None:
    assert tuple(drawn) == NAMES
    for picture in drawn.values():
        assert picture.title and picture.caption and len(numbers(picture.alt)) >= 3
        for svg, part in zip(elements(picture), picture.parts, strict=True):
            assert svg.tag == f"{SVG}svg" and svg.get("role") == "img"
            ids = {each.get("id"): each for each in svg.iter() if each.get("id")}
            title, desc = (ids[name] for name in svg.attrib["aria-labelledby"].split())
            assert (title.text, desc.text) == (part.title, part.alt)


def test_matrices_hold_the_similarities_in_the_order_of_the_groups(drawn: dict[str, Picture]) -> None:
    data = report()
    low, high = limits(data.layers)
    palette = colormaps["viridis"].resampled(LEVELS)
    for each, svg in zip(data.layers, elements(drawn["similarity"])[1:], strict=True):
        assert each.similarity is not None
        grouped = [expert for group in each.groups if len(group) > 1 for expert in group]
        assert sorted(order(each)) == list(range(each.experts))
        assert set(order(each)[: len(grouped)]) == set(grouped) and order(each)[-1:] == each.dropped
        wanted = [[each.similarity[row][column] for column in order(each)] for row in order(each)]
        shades = palette((np.array(wanted) - low) / (high - low), bytes=True)[..., :3]
        assert (pixels(svg) == shades).all()


def test_groups_are_outlined_where_they_lie(drawn: dict[str, Picture]) -> None:
    each = report().layers[0]
    svg = elements(drawn["similarity"])[1]
    outlines = [path for path in svg.iter(f"{SVG}path") if "#fefefe" in path.attrib["style"]]
    solid = [path for path in outlines if "dash" not in path.attrib["style"]]
    dashed = [path for path in outlines if "dash" in path.attrib["style"]]
    sizes = [len(group) for group in each.groups if len(group) > 1]
    assert sum(path.attrib["d"].count("M") for path in solid) == len(sizes) and len(dashed) == bool(each.dropped)
    corners = np.array(numbers(dashed[0].attrib["d"])).reshape(-1, 2)
    side = 2.1 * 72
    assert np.ptp(corners, axis=0) == pytest.approx([side * len(each.dropped) / each.experts] * 2, abs=0.2)


def test_scale_holds_all_but_the_diagonal() -> None:
    low, high = limits(report().layers)
    off = [
        value for each in report().layers for row, line in enumerate(each.similarity or ())
        for column, value in enumerate(line) if row != column
    ]  # fmt: skip
    assert low <= min(off) < low + 0.1 and high - 0.1 < max(off) <= high


def test_alternative_of_a_matrix_by_hand() -> None:
    matrix = ((1.0, 0.2, 0.9), (0.2, 1.0, 0.4), (0.9, 0.4, 1.0))
    made = layer(0, 3, 2, 0, groups=((0, 2), (1,)), dropped=(), similarity=matrix)
    assert matrix_alt(made) == (
        "3 experts in 2 slots; merged groups: 0+2; dropped: none. Mean similarity of all pairs 0.5, within merged "
        "groups 0.9. The most alike are 0 and 2 with 0.9."
    )


def test_bars_are_as_high_as_the_shares(drawn: dict[str, Picture]) -> None:
    data = report()
    highest = max(max(*(each.visits_before or ()), *(each.visits_after or ())) for each in data.layers)
    for each, svg in zip(data.layers, elements(drawn["visits"])[1:], strict=True):
        found = [
            height
            for path in svg.iter(f"{SVG}path")
            if "clip-path" in path.attrib and "dash" not in path.attrib["style"]
            for height in _heights(path.attrib["d"])
        ]
        shown = [*(each.visits_before or ()), *(each.visits_after or ())]
        assert len(found) == each.experts + each.kept
        scale = 0.62 * 72 / (1.02 * highest)
        assert sorted(found) == pytest.approx(sorted(scale * value for value in shown), abs=0.15)


def _heights(path: str) -> list[float]:
    """Of each bar, which is a path of its own."""
    bars = [np.array(numbers(bar)).reshape(-1, 2) for bar in path.split("M")[1:]]
    return [float(np.ptp(bar[:, 1])) for bar in bars]


def test_alternative_of_visits_by_hand() -> None:
    made = layer(0, 4, 2, 0, visits_before=(0.4, 0.1, 0.3, 0.2), visits_after=(0.5, 0.5))
    before, after = visit_alt(made).split(" After: ")
    assert before.startswith("Before: 4 experts, from 10.0% (expert 1) to 40.0% (expert 0); maximum 1.6 times the mean")
    assert after == "2 slots, from 50.0% (slot 0) to 50.0% (slot 0); maximum 1 times the mean, entropy 1."
    assert "which no token reached" in visit_alt(replace(made, visits_before=(0.0,) * 4))
    assert "not counted" in visit_alt(replace(made, visits_after=None))


def test_every_expert_has_one_fate() -> None:
    made = layer(1, 16, 12, 1)
    found = fates(made)
    assert sorted(found) == list(range(16)) and found[15] == "dropped" and found[11] == "protected as slot 11"
    assert found[0] == found[12] == "merged into slot 0" and found[5] == "kept as slot 5"


@given(st.sets(st.integers(0, 40)))
def test_lists_of_numbers_can_be_read_back(chosen: set[int]) -> None:
    read: set[int] = set()
    for part in listed(tuple(chosen)).replace("none", "").split(", "):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1)) if first else set()
    assert read == chosen


def test_layers_of_equal_number_are_told_apart_by_module() -> None:
    names = [name for _, name in named([layer(0), layer(0, module="vision.0"), layer(1)])]
    assert names == ["model.layers.0.mlp.experts", "vision.0", "Layer 1"]


def test_colours_are_the_pages_variables(drawn: dict[str, Picture]) -> None:
    assert len(set(colours().values())) == len(colours())
    fixed = {"#fefefe", "#0b0d10"}
    for picture in drawn.values():
        roles = dict(re.findall(r"var\(--([a-z]+),(#[0-9a-f]{6})\)", picture.svg))
        assert roles.items() <= dict(colours()).items()
        rest = re.sub(r"var\([^)]*\)|base64,[^\"]*|(?:url\(|href=\")#[^)\"]*", "", picture.svg)
        assert set(re.findall(r"#[0-9a-f]{6}\b", rest)) <= fixed and "font-family" not in rest


def test_ids_are_unique_and_every_reference_is_met(drawn: dict[str, Picture]) -> None:
    everything = [each for picture in drawn.values() for svg in elements(picture) for each in svg.iter()]
    ids = [each.attrib["id"] for each in everything if "id" in each.attrib]
    assert len(ids) == len(set(ids))
    text = "".join(picture.svg for picture in drawn.values())
    referred = {*re.findall(r"url\(#([^)]+)\)", text), *re.findall(r'href="#([^"]+)"', text)}
    assert referred and referred <= set(ids)


def test_nothing_is_left_of_the_tool_that_drew(drawn: dict[str, Picture]) -> None:
    for picture in drawn.values():
        tags = {each.tag.removeprefix(SVG) for svg in elements(picture) for each in svg.iter()}
        assert tags <= {"svg", "title", "desc", "g", "path", "text", "image", "defs", "clipPath", "rect", "use"}
        assert "matplotlib" not in picture.svg.lower() and "<!--" not in picture.svg


def test_text_is_text(drawn: dict[str, Picture]) -> None:
    said = "".join("".join(svg.itertext()) for svg in elements(drawn["gate"]))
    assert "✗ rte: fail" in said and "? openbookqa: inconclusive" in said


def test_png_is_drawn_with_every_part(drawn: dict[str, Picture]) -> None:
    for picture in (drawn["similarity"], drawn["gate"]):
        content = png(picture)
        image = Image.open(io.BytesIO(content))
        assert image.format == "PNG" and not set(image.info) - {"dpi"}
        shown = np.asarray(image.convert("RGB"))
        assert (shown[[0, -1]] == 255).all() and len(image.convert("RGB").getcolors(shown.size) or ()) > 20
        size = np.array(shown.shape[:2]) / 150
        area = sum(part.size[0] * part.size[1] for part in picture.parts)
        assert area <= size[0] * size[1] <= 3 * area + 3


def test_same_data_same_bytes() -> None:
    first, second = pictures(report(1)), pictures(report(1))
    assert first == second and [each.svg for each in first] == [each.svg for each in second]
    assert png(first[1]) == png(second[1])


def test_what_is_not_known_is_not_drawn() -> None:
    assert list(by_name(bare())) == ["sizes"]
    half = report(2)
    half = replace(half, layers=(replace(half.layers[0], similarity=None, visits_before=(0.0,) * 16), half.layers[1]))
    assert len(by_name(half)["similarity"].parts) == 2 and len(by_name(half)["visits"].parts) == 3
    assert phases(replace(half, seconds={"total": 3.0, "a": 1.0, "b": 2.0})) == [("a", 1.0), ("b", 2.0)]


def test_kept_everything_has_errors_of_zero() -> None:
    exact = replace(report(1), layers=(layer(0, heldout_error_before=None, heldout_error_after=None, error=0.0),))
    assert "from 0 (Layer 0) to 0 (Layer 0)" in by_name(exact)["errors"].alt


def test_hostile_names_stay_text() -> None:
    for picture in pictures(hostile()):
        for svg in elements(picture):
            assert not [each for each in svg.iter() if "script" in each.tag or "style" in each.tag]
            assert "\x00" not in "".join(svg.itertext())
    assert HOSTILE[:8] not in by_name(hostile())["gate"].svg


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(gates())
def test_any_gate_can_be_drawn(gate: object) -> None:
    found = by_name(replace(bare(), gate=gate))  # type: ignore[arg-type]
    for picture in found.values():
        assert "nan" not in "".join(each.attrib.get("d", "") for svg in elements(picture) for each in svg.iter())
