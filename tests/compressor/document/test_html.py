from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.document import blocks as b
from compressor.document.html import page, stylesheet
from compressor.document.picture import Drawing
from compressor.formatting import readable
from tests.support.report_data import HOSTILE, Tree

TEXTS = st.one_of(st.text(max_size=20), st.sampled_from([HOSTILE, "{{ 7 * 7 }}", "{% raw %}", "&amp;", "</td>", "]]>"]))
DRAWING = Drawing("One", "Seen.", (2.0, 1.0), lambda canvas: None)


def made(*blocks: b.Block, title: str = "Title") -> Tree:
    tiles = b.Facts((("Tile", ("3", " ", b.Note("small"))),))
    return Tree(
        page(title, "Some report", "Lead.", tiles, (b.Heading("First", 2, "first"), *blocks), "Made by a test.")
    )


BLOCKS: dict[str, tuple[Callable[[str], b.Block], str]] = {  # how a text gets in, and the elements that hold it alone
    "text": (b.Text, "p"),
    "heading": (lambda text: b.Heading(text, 3), "h3"),
    "listing": (b.Listing, "pre"),
    "item": (lambda text: b.Items((text,)), "li"),
    "fact": (lambda text: b.Facts(((text, b.Items((text,))),)), "dt"),
    "cell": (lambda text: b.Table("", ("",), ((text,),)), "th"),
    "column": (lambda text: b.Table("", (text,), ()), "th"),
    "caption": (lambda text: b.Table(text, ("",), ()), "caption"),
    "summary": (lambda text: b.Details(text, (b.Text("below"),)), "summary"),
    "code": (lambda text: b.Text(b.Code(text)), "code"),
    "link": (lambda text: b.Text(b.Link(text, "#first")), "a"),
    "strong": (lambda text: b.Text(b.Strong((text,))), "strong"),
    "toned": (lambda text: b.Text(b.Toned(text, "good")), "span"),
    "figure": (lambda text: b.Figure("name", "Title", text, (DRAWING,)), "figcaption"),
}


@pytest.mark.parametrize("kind", BLOCKS)
@settings(max_examples=12)
@given(text=TEXTS)
def test_any_text_comes_out_as_the_same_text(kind: str, text: str) -> None:
    build, element = BLOCKS[kind]
    tree = made(build(text), title=text)
    assert [title for _, title in tree.named("h1")] == [readable(text)]
    found = [words for _, words in tree.named(element)]
    assert readable(text) in found or (kind == "figure" and f"Title. {readable(text)}" in found)


def test_sections_hold_what_stands_below_their_heading() -> None:
    figure = b.Figure("f", "F", "c", (DRAWING,))
    tree = made(b.Text("1"), b.Heading("inner", 3), b.Heading("B", 2, "b"), figure, b.Text("2"))
    told = [text.split() for each, text in tree.named("div") if each.get("class") == "told"]
    assert told == [["1", "inner"], ["2"]]  # a figure that leads its section stands before
    assert [(each["id"], "F. c" in text) for each, text in tree.named("section")] == [("first", False), ("b", True)]


def test_wide_figures_scroll_by_keyboard_and_groups_name_themselves() -> None:
    drawings = {"many": (DRAWING, DRAWING), "narrow": (DRAWING,),
                "wide": (Drawing("Wide", "Seen.", (8.0, 1.0), lambda canvas: None),)}  # fmt: skip
    tree = made(*(b.Figure(name, f"The {name}", "c", drawn) for name, drawn in drawings.items()))
    found = {attributes["class"]: attributes for attributes, _ in tree.named("div")
             if attributes.get("class", "").startswith(("one", "many"))}  # fmt: skip
    assert found["many"]["role"] == "group" and found["many"]["aria-label"] == "The many"
    assert found["one scrolls"]["tabindex"] == "0" and found["one scrolls"]["aria-label"] == "The wide"
    assert set(found["one"]) == {"class"}


def test_signs_are_hidden_from_who_hears_the_page_and_there_is_one_style_sheet() -> None:
    tree = made(b.Text(b.Toned("pass", "good", "✓"), "good"))
    (sign,) = (each for each, text in tree.named("span") if text == "✓")
    assert sign == {"aria-hidden": "true", "class": "sign"}
    assert ("verdict good", "✓ pass") in [(each.get("class"), text) for each, text in tree.named("p")]
    content = page("T", "Kind", "L", b.Facts(()), (b.Heading("A", 2, "a"),), "M")
    assert content.count("<style>") == content.count("</style>") == 1 and stylesheet() in content
    assert "{{" not in content and "{%" not in content
