import io
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from compressor.document.drawing import draw_bars, draw_heat, draw_key
from compressor.document.picture import DPI, Drawing, inline_svgs, png

SVG = "{http://www.w3.org/2000/svg}"


def bars(canvas: Any) -> None:
    draw_bars(canvas.subplots(), [0.1, 0.4, 0.5], ["kept", "merged", "dropped"], 0.3)


def heat(canvas: Any) -> None:
    draw_heat(canvas.subplots(), [[0.1, 0.4], [0.5, 0.9]], 0.0, 1.0)


def key(canvas: Any) -> None:
    draw_key(canvas, [("kept", {"facecolor": "#dddddd"}), ("dropped", {"marker": "x"})])


DRAWINGS = (
    Drawing("Key", "Two looks.", (2.0, 0.6), key),
    Drawing("Bars", "Three bars.", (2.5, 1.5), bars),
    Drawing("Heat <b>", "Four & more.", (2.0, 2.0), heat),
)


def test_svgs_have_their_words_and_size() -> None:
    for drawing, text in zip(DRAWINGS, inline_svgs("some", DRAWINGS), strict=True):
        svg = ElementTree.fromstring(text)
        assert svg.tag == f"{SVG}svg" and svg.get("role") == "img"
        assert svg.get("class") == "plot"
        ids = {each.get("id"): each.text for each in svg.iter() if each.get("id")}
        assert [ids[name] for name in svg.attrib["aria-labelledby"].split()] == [drawing.title, drawing.alt]
        size = [float(svg.attrib[name]) / 96 for name in ("width", "height")]
        assert size == pytest.approx(drawing.size, abs=0.01)


def test_ids_are_unique_and_every_reference_is_met() -> None:
    text = "".join([*inline_svgs("one", DRAWINGS), *inline_svgs("two", DRAWINGS)])
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids)) and all(name.startswith(("one-", "two-")) for name in ids)
    referred = {*re.findall(r"url\(#([^)]+)\)", text), *re.findall(r'href="#([^"]+)"', text)}
    assert referred and referred <= set(ids)


def test_png_shows_title_key_and_drawings() -> None:
    assert inline_svgs("one", DRAWINGS) == inline_svgs("one", DRAWINGS) and png("T", DRAWINGS) == png("T", DRAWINGS)
    whole, alone = (Image.open(io.BytesIO(png("Title", drawings))) for drawings in (DRAWINGS, DRAWINGS[1:2]))
    assert set(whole.info) <= {"dpi"}
    assert np.array(alone.size) / DPI == pytest.approx([2.5, 0.34 + 1.5], abs=0.02)
    assert np.array(whole.size) / DPI == pytest.approx([3 * 2.5, 0.34 + 2.0], abs=0.02)
    pixels = np.asarray(whole.convert("L"))
    for top, bottom in ((0.0, 0.34), (0.34, 2.34)):  # something is drawn in every line
        assert pixels[int(top * DPI) : int(bottom * DPI)].min() < 100
