import re
import shlex
from itertools import pairwise

import pytest

from compressor.document.drawing import ROLES
from compressor.document.html import POLICY, stylesheet
from compressor.quality_gate.report import verdict_line
from compressor.report.data import Report
from compressor.report.figures import NAMES, figures
from compressor.report.page import page
from tests.support.report_data import HOSTILE, STEPS, Tree, bare, hostile, report

ANCHORS = (
    "done", "sizes", "experts", "similarity", "visits", "errors", "steps", "heldout", "hubs", "gate", "speed", "cost",
)  # fmt: skip
TEXT_PAIRS = [  # what stands on what
    (text, ground) for ground in ("paper", "panel") for text in ("text", "muted", "link", "good", "bad", "unsure")
] + [("text", "faint")]
SHAPES = ("ink", "muted", "before", "after", "kept", "merged", "dropped", "good", "bad", "unsure")  # of drawings


def made(data: Report) -> str:
    return page(data, figures(data))


@pytest.fixture(scope="module")
def whole() -> str:
    return made(report())


@pytest.fixture(scope="module")
def tree(whole: str) -> Tree:
    return Tree(whole)


def text_of(content: str) -> str:
    """What a reader sees: the text of the body."""
    ((_, text),) = Tree(content).named("body")
    return text


def test_parts_are_there_in_order_and_linked(tree: Tree) -> None:
    ids = [attributes["id"] for _, attributes, _ in tree.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [attributes["id"] for attributes, _ in tree.named("section")] == list(ANCHORS)
    links = [attributes["href"] for attributes, _ in tree.named("a")]
    assert {f"#{name}" for name in ANCHORS} <= set(links) and {link[1:] for link in links} <= set(ids)
    for _, attributes, _ in tree.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set(attributes.get(name, "").split()) <= set(ids)
    levels = [int(tag[1]) for tag, _, _ in tree.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_nothing_is_loaded(whole: str, tree: Tree) -> None:
    (head,) = (each for each, _ in tree.named("meta") if each.get("http-equiv") == "Content-Security-Policy")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert head["content"] == POLICY and POLICY.startswith(policy)
    addresses = set(re.findall(r"\b[a-z]+://[^\s\"'<)]+|[\"'(]//[^\s\"'<)]+", whole))
    assert addresses == {"http://www.w3.org/2000/svg"}
    loading = {"script", "link", "iframe", "img", "object", "embed", "base"}
    assert not loading & {tag for tag, _, _ in tree.elements}
    for _, attributes, _ in tree.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert attributes.get("href", "#").startswith(("#", "data:image/png;base64,"))
    assert re.findall(r"url\((?!#)|@import", whole) == []


def test_figures_and_tables_are_described_and_reached_by_keyboard(whole: str, tree: Tree) -> None:
    found = [attributes["id"] for attributes, _ in tree.named("figure")]
    assert found == [f"figure-{name}" for name in NAMES] and len(list(tree.named("figcaption"))) == len(found)
    said = {attributes["id"]: text for attributes, text in tree.named("title", "desc") if "id" in attributes}
    for attributes, _ in tree.named("svg"):
        assert attributes["role"] == "img" and all(said[name] for name in attributes["aria-labelledby"].split())
    regions = [attributes for _, attributes, _ in tree.elements if attributes.get("class") == "scroll"]
    assert len(regions) == len(list(tree.named("table"))) == len(list(tree.named("caption"))) >= 15
    assert all(each["tabindex"] == "0" and each["role"] == "region" and each["aria-label"] for each in regions)
    assert all(attributes["scope"] in ("row", "col") for attributes, _ in tree.named("th"))
    folded = [tag for (tag, *_), above in zip(tree.elements, tree.ancestors, strict=True) if "details" in above]
    assert folded.count("table") == 3 * len(report().layers)
    assert next(tree.named("html"))[0]["lang"] == "en"
    metas = {attributes.get("name"): attributes.get("content") for attributes, _ in tree.named("meta")}
    assert metas["viewport"] == "width=device-width, initial-scale=1" and metas["color-scheme"] == "light dark"
    assert "prefers-color-scheme: dark" in whole and "@media print" in whole and ":focus-visible" in whole
    first = next(tree.named("a"))
    assert first[0]["href"] == "#report" and first[1].startswith("Skip")


def test_run_and_gate_are_reported(whole: str) -> None:
    data, text = report(), text_of(whole)
    assert data.command and data.gate
    for words in (data.plan.source.model, data.strategy, shlex.join(data.command), data.plan.digest(), "torch 2.13.0",
                  "bcd778843d96ce6f", "16 before, 12 after, top 2", "method tune, steps 300", "weight 0.75",
                  *data.missing, *data.left_out, *data.zeroed_fields, "Peak memory: 812 MB",
                  "16,384 tokens of texts.jsonl", "L1 E11", "protected as slot 11", verdict_line(data.gate),
                  "✓ pass", "✗ fail", "? inconclusive"):  # fmt: skip
        assert words in text


def test_unknown_is_said_plainly_and_leaves_no_empty_figure() -> None:
    content = made(bare())
    text, tree = text_of(content), Tree(content)
    for said in ("The similarity of experts was not measured", "The share of tokens was not measured",
                 "The reconstruction error was not measured", "None: no hubs were named",
                 "The accuracy gate was not run", "No times were recorded", "The peak memory was not recorded",
                 "The command was not recorded", "no text was read",
                 *bare().missing):  # fmt: skip
        assert said in text
    assert "moe-compress gate org/some-moe-model smaller-model" in text
    assert [attributes["id"] for attributes, _ in tree.named("figure")] == ["figure-experts"]
    assert "nan" not in text.lower().split() and "None," not in text
    assert "<" not in text and [link for link, said in tree.named("a") if said == "what is missing"]


def test_hostile_names_are_shown_as_they_are() -> None:
    content = made(hostile())
    tree = Tree(content)
    assert not list(tree.named("script")) and content.count("</style>") == 1
    assert "<script>alert(1)</script> & \"q\" 'a' $x_1$" in text_of(content)
    assert len(list(tree.named("section"))) == len(ANCHORS) and not set("\x00\x1b\u202e") & set(content)
    assert content.encode("utf-8").decode("utf-8") == content
    assert HOSTILE not in content


def test_steps_on_the_whole_model_are_told_in_numbers(whole: str) -> None:
    text = text_of(whole)
    assert "by hc-smoe, reconstruction, router calibration and distillation." in text
    assert "(auto, took router): KL 0.41 to 0.36 nats per token from the base on held-out text" in text
    assert "istillation (experts, at most 30 steps of 2048 tokens): KL 0.36 to 0.125 nats per token from" in text
    cells = [text.strip() for _, text in Tree(whole).named("td")]
    assert {"0.01", "1.5", "0.05", "0.004"} <= set(cells)  # of the first round
    for entry in STEPS[1]["result"]["curve"]:
        assert (f"{entry['kl']:g}", f"{entry['loss']:g}") in pairwise(cells)


@pytest.mark.full
def test_steps_may_be_repeated_or_change_nothing() -> None:
    again = {**STEPS[1], "result": {**STEPS[1]["result"], "before": 0.125, "after": 0.0625}}
    text = text_of(made(report(2, steps=(*STEPS, again))))
    assert "by hc-smoe, reconstruction, router calibration and distillation." in text
    assert text.count("0.36 to 0.125 nats") == 1 and text.count("0.125 to 0.0625 nats") == 1
    assert text.count("0.36 after 0 steps, 0.13 after 30; the state after 20 was taken, at 0.125") == 2
    routers = {"name": "routers", "options": {}, "result": {"before": 0.4, "after": 0.4, "steps": []}}
    kept = {**STEPS[1], "result": {**STEPS[1]["result"], "changed": False}}
    text = text_of(made(report(2, steps=(routers, kept))))
    assert "by hc-smoe and reconstruction." in text and "the routers stay as they are" in text
    assert "tokens): nothing was changed" in text and "0.36 after 0 steps, 0.13 after 30; nothing was changed" in text


@pytest.mark.full
def test_same_data_same_page(whole: str) -> None:
    assert made(report()) == whole and not re.search(r"20[2-9]\d-\d\d-\d\d", whole)
    assert len(whole.encode()) < 300_000


@pytest.mark.full
def test_page_of_a_large_model_is_not_too_large() -> None:
    """By what each of its layers adds."""
    small, large = (len(made(report(depth, 128, 96)).encode()) for depth in (2, 4))
    assert 128**2 < (large - small) / 2 < 8_000_000 / 48  # a byte for each cell is what images take at the least


def luminance(code: str | tuple[float, ...]) -> float:
    """Relative luminance of #rrggbb or of three parts, as WCAG 2 defines it."""
    parts = [int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)] if isinstance(code, str) else code
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str | tuple[float, ...], second: str) -> float:
    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def colours(mode: str) -> dict[str, str]:
    """The page's colours by role."""
    light, dark = (
        dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", stylesheet(), re.S)
    )
    assert set(light) == set(dark)
    return light if mode == "light" else dark


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_contrast_is_enough(mode: str) -> None:
    """Of words, and of shapes in drawings, which the style sheet's filter turns in dark mode."""
    found = colours(mode)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert (luminance(found["paper"]) < 0.05) == (mode == "dark")
    for text, ground in TEXT_PAIRS:
        assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    for role in SHAPES:
        assert contrast(turned(ROLES[role]) if mode == "dark" else ROLES[role], found["paper"]) >= 3, role
    used = set(re.findall(r"var\(--([a-z]+)\)", stylesheet()))
    assert used <= set(re.findall(r"--([a-z]+):", stylesheet())) and "!important" not in stylesheet()


def turned(code: str) -> tuple[float, ...]:
    """invert(amount) hue-rotate(180deg) as Filter Effects Module Level 1 defines them."""
    (amount,) = map(float, re.findall(r"filter: invert\(([\d.]+)\) hue-rotate\(180deg\)", stylesheet()))
    parts = [int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (amount - (2 * amount - 1) * part for part in parts)
    grey = 2 * (0.213 * red + 0.715 * green + 0.072 * blue)  # a turn by 180 degrees: twice the grey less the colour
    return tuple(min(max(grey - part, 0.0), 1.0) for part in (red, green, blue))
