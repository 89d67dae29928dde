from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.document.blocks import (
    Block,
    Code,
    Details,
    Facts,
    Figure,
    Heading,
    Items,
    Link,
    Listing,
    Note,
    Strong,
    Table,
    Text,
    Toned,
)
from compressor.document.html import page, stylesheet
from compressor.document.picture import Drawing
from compressor.formatting import readable
from tests.support.report_data import HOSTILE, Tree

TEXTS = st.one_of(st.text(max_size=20), st.sampled_from([HOSTILE, "{{ 7 * 7 }}", "{% raw %}", "&amp;", "</td>", "]]>"]))
DRAWING = Drawing("One", "Seen.", (2.0, 1.0), lambda canvas: None)


def made(*blocks: Block, title: str = "Title") -> Tree:
    tiles = Facts((("Tile", ("3", " ", Note("small"))),))
    return Tree(page(title, "Some report", "Lead.", tiles, (Heading("First", 2, "first"), *blocks), "Made by a test."))


BLOCKS: dict[str, tuple[Callable[[str], Block], str]] = {  # how a text gets in, and the elements that hold it alone
    "text": (Text, "p"),
    "heading": (lambda text: Heading(text, 3), "h3"),
    "listing": (Listing, "pre"),
    "item": (lambda text: Items((text,)), "li"),
    "fact": (lambda text: Facts(((text, Items((text,))),)), "dt"),
    "cell": (lambda text: Table("", ("",), ((text,),)), "th"),
    "column": (lambda text: Table("", (text,), ()), "th"),
    "caption": (lambda text: Table(text, ("",), ()), "caption"),
    "summary": (lambda text: Details(text, (Text("below"),)), "summary"),
    "code": (lambda text: Text(Code(text)), "code"),
    "link": (lambda text: Text(Link(text, "#first")), "a"),
    "strong": (lambda text: Text(Strong((text,))), "strong"),
    "toned": (lambda text: Text(Toned(text, "good")), "span"),
    "figure": (lambda text: Figure("name", "Title", text, (DRAWING,)), "figcaption"),
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
    figure = Figure("f", "F", "c", (DRAWING,))
    tree = made(Text("1"), Heading("inner", 3), Heading("B", 2, "b"), figure, Text("2"))
    told = [text.split() for each, text in tree.named("div") if each.get("class") == "told"]
    assert told == [["1", "inner"], ["2"]]  # a figure that leads its section stands before
    assert [(each["id"], "F. c" in text) for each, text in tree.named("section")] == [("first", False), ("b", True)]


def test_wide_figures_scroll_by_keyboard_and_groups_name_themselves() -> None:
    drawings = {"many": (DRAWING, DRAWING), "narrow": (DRAWING,),
                "wide": (Drawing("Wide", "Seen.", (8.0, 1.0), lambda canvas: None),)}  # fmt: skip
    tree = made(*(Figure(name, f"The {name}", "c", drawn) for name, drawn in drawings.items()))
    found = {attributes["class"]: attributes for attributes, _ in tree.named("div")
             if attributes.get("class", "").startswith(("one", "many"))}  # fmt: skip
    assert found["many"]["role"] == "group" and found["many"]["aria-label"] == "The many"
    assert found["one scrolls"]["tabindex"] == "0" and found["one scrolls"]["aria-label"] == "The wide"
    assert set(found["one"]) == {"class"}


def test_signs_are_hidden_from_who_hears_the_page_and_there_is_one_style_sheet() -> None:
    tree = made(Text(Toned("pass", "good", "✓"), "good"))
    (sign,) = (each for each, text in tree.named("span") if text == "✓")
    assert sign == {"aria-hidden": "true", "class": "sign"}
    assert ("verdict good", "✓ pass") in [(each.get("class"), text) for each, text in tree.named("p")]
    content = page("T", "Kind", "L", Facts(()), (Heading("A", 2, "a"),), "M")
    assert content.count("<style>") == content.count("</style>") == 1 and stylesheet() in content
    assert "{{" not in content and "{%" not in content
