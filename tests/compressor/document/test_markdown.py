from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markdown_it import MarkdownIt

from compressor.document import blocks as b
from compressor.document.markdown import filled, markdown
from compressor.document.picture import Drawing

PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
NASTY = st.text(st.sampled_from("ab 1._-*`|<>[]()!#&~$\\+=:{}\"'/?@^%\n"), min_size=1, max_size=24).filter(str.strip)
LINE = st.one_of(NASTY, st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=20))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append(dict(attrs))
        if tag not in ("img", "hr", "br"):
            self.open.append(tag)
            self.texts.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.texts:
            tag, text = self.texts[-1]
            self.texts[-1] = tag, text + data


def _read(*blocks: object, images: dict[str, str] | None = None) -> _Reader:
    reader = _Reader()
    reader.feed(PARSER.render(markdown(blocks, images or {})))  # type: ignore[arg-type]
    return reader


def _texts(reader: _Reader) -> list[tuple[str, str]]:
    return [(tag, " ".join(text.split())) for tag, text in reader.texts]


def _line(text: str) -> str:
    return " ".join(text.split())


@given(LINE)
def test_foreign_text_means_nothing_in_any_block(text: str) -> None:
    said = _line(text)
    assert _texts(_read(b.Text(text))) == [("p", said)]
    assert _texts(_read(b.Heading(text, 3))) == [("h3", said)]
    assert _texts(_read(b.Items((text, "b")))) == [("ul", ""), ("li", said), ("li", "b")]
    assert _texts(_read(b.Facts((("x", text),)))) == [("ul", ""), ("li", f"x: {said}")]
    cells = _texts(_read(b.Table("", ("c", text), ((text, "2"),))))
    assert [each for each in cells if each[0] in ("th", "td")] == [("th", "c"), ("th", said), ("td", said), ("td", "2")]
    assert ("summary", said) in _texts(_read(b.Details(text, (b.Text("inner"),))))
    assert _texts(_read(b.Text(("a ", b.Strong(f"b{text}c")))))[0] == ("p", "a")
    assert _texts(_read(b.Text(("a ", b.Strong(f"b{text}c")))))[1] == ("strong", _line(f"b{text}c"))
    assert _texts(_read(b.Text((b.Link(text, "https://example.org/x"),))))[1] == ("a", said)


@given(LINE)
@example("1\n\n\n1")
def test_code_is_shown_as_it_is(text: str) -> None:
    texts = _texts(_read(b.Text((b.Code(text),))))
    assert "".join(each for _, each in texts) == _line(text)
    cells = [
        each for each in _texts(_read(b.Table("", ("c", "d"), (("x", b.Code(text)),)))) if each[0] in ("td", "code")
    ]
    assert "".join(each for _, each in cells) == "x" + _line(text)
    (listing,) = [inner for tag, inner in _read(b.Listing(text.strip("\n"), "bash")).texts if tag == "code"]
    assert listing.rstrip("\n").replace("\r", "\n") == text.strip("\n").rstrip("\n").replace("\r", "\n")


@given(LINE)
def test_a_picture_has_its_words(text: str) -> None:
    figure = b.Figure("x", "t", "c", (Drawing("t", text, (1, 1), lambda canvas: None),))
    (image,) = [each for each in _read(figure, images={"x": "images/a b.png"}).attributes if "alt" in each]
    assert (image["src"], _line(image["alt"] or "")) == ("images/a%20b.png", _line(text))
    assert markdown([figure]).strip() == ""


def test_a_table_aligns_numbers_to_the_right_and_is_called_by_its_caption() -> None:
    rows = (("a", "1", "x"), ("b", b.Toned("pass", "good", "✓"), b.Note("y")))
    table = b.Table("Sizes", ("", "size", "why"), rows, {"why"})
    assert markdown([table]).splitlines() == [
        "Sizes:", "", "|  | size | why |", "| :--- | ---: | :--- |", "| a | 1 | x |", "| b | pass | y |",
    ]  # fmt: skip
    assert "Sizes:" not in markdown([b.Heading("Sizes"), table])


@pytest.mark.parametrize("text", ["- x", "1. x", "12) x", "> x", "+ x", "# x", "=== ", "--- "])
def test_a_paragraph_does_not_become_something_else(text: str) -> None:
    assert _texts(_read(b.Text(text))) == [("p", text.strip())]


def test_a_template_shows_every_value_and_refuses_what_is_undefined() -> None:
    values = {"number": 12, "share": -0.5, "flag": False, "words": ("a*", b.Code("b")), "nothing": None}
    template = "{{ number }} {{ share }} {{ flag }} {{ words }}{{ nothing }}."
    assert filled(template, {}, **values) == "12 -0.5 False a\\*`b`.\n"
    with pytest.raises(UndefinedError, match="'missing' is undefined"):
        filled("a {{ missing }} b", {})
