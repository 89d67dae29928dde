"""matplotlib's SVG made fit for a page: without files, metadata or sizes of its own, in the page's colours and font."""

import base64
import io
import re
from collections.abc import Mapping
from xml.etree import ElementTree

from compressor.report.drawing import Part, colours, part_svg, readable

SPACE = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
PIXELS = 96 / 72  # of a point
LONG = re.compile(r"-?\d+\.\d{2,}(?:e-?\d+)?")
HEX = re.compile(r"#[0-9a-f]{6}\b")
REFERENCE = re.compile(r"(?<=url\(#)[^)]+|(?<=^#).+")
PNG_DATA = "data:image/png;base64,"


def inline_svg(part: Part, prefix: str) -> str:
    """One part as an SVG element with a title and a description; every id in it begins with `prefix`."""
    root = ElementTree.fromstring(part_svg(part))
    for element in list(root.iter()):
        element.tag = element.tag.removeprefix(f"{{{SPACE}}}")
        element.tail = None
        if element.tag != "text":
            element.text = None
    _slim(root)
    _rename(root, prefix)
    for element in root.iter():
        _restyle(element)
    for defs in root.findall("defs"):
        defs[:] = [each for each in defs if each.tag != "style"]
    return ElementTree.tostring(_dressed(root, part, prefix), encoding="unicode")


def _dressed(root: ElementTree.Element, part: Part, prefix: str) -> ElementTree.Element:
    """The element with its size in the page, its text alternative and what all drawings share."""
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    dressed = ElementTree.Element(
        "svg",
        {
            "xmlns": SPACE, "class": "legend" if part.is_legend else "plot",
            "viewBox": f"{left:g} {top:g} {width:g} {height:g}",
            "width": f"{width * PIXELS:.0f}", "height": f"{height * PIXELS:.0f}", "role": "img",
            "aria-labelledby": f"{prefix}-title {prefix}-desc", "fill": "currentColor", "stroke-linejoin": "round",
        },
    )  # fmt: skip
    for tag, text in (("title", part.title), ("desc", part.alt)):
        ElementTree.SubElement(dressed, tag, {"id": f"{prefix}-{tag}"}).text = readable(text)
    dressed.extend(child for child in root if child.tag != "defs" or len(child))
    return dressed


def _slim(parent: ElementTree.Element) -> None:
    """Leave out groups that say nothing but a name, and shapes that nobody sees."""
    kept: list[ElementTree.Element] = []
    for child in parent:
        _slim(child)
        style = child.get("style", "")
        if child.tag == "metadata" or (child.tag == "path" and style == "fill: none"):
            continue
        is_plain = child.tag == "g" and set(child.attrib) <= {"id"}
        kept += list(child) if is_plain else [child]
    parent[:] = kept


def _rename(root: ElementTree.Element, prefix: str) -> None:
    """Number the ids that something refers to, and drop the others."""
    used = [found for element in root.iter() for value in element.attrib.values() for found in REFERENCE.findall(value)]
    names = {name: f"{prefix}-{number}" for number, name in enumerate(dict.fromkeys(used))}
    for element in root.iter():
        name = element.attrib.pop("id", None)
        if name in names:
            element.set("id", names[name])
        if (link := element.attrib.pop(LINK, None)) is not None:
            element.set("href", link)
        for attribute in ("href", "clip-path"):
            if attribute in element.attrib:
                element.set(attribute, REFERENCE.sub(lambda found: names[found[0]], element.attrib[attribute]))


def _restyle(element: ElementTree.Element) -> None:
    """Use the page's font and colours, and no more digits than an eye can see."""
    style = element.get("style", "")
    if element.tag == "image":
        element.set("href", small_image(element.attrib["href"]))
        element.set("style", "image-rendering:pixelated")
    elif style:
        parts = [each for each in style.split("; ") if not each.startswith("font-family")]
        element.set("style", HEX.sub(lambda found: _variable(found[0]), ";".join(parts)))
    for name in ("d", "x", "y", "width", "height", "transform"):
        if name in element.attrib:
            element.set(
                name,
                LONG.sub(
                    lambda found: f"{float(found[0]):.3g}" if abs(float(found[0])) < 10 else f"{float(found[0]):.1f}",
                    element.attrib[name],
                ),
            )
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    if "d" in element.attrib:
        element.set("d", " ".join(element.attrib["d"].split()))


def _variable(code: str) -> str:
    """The page's variable of a colour's role; itself if it has none."""
    return "currentColor" if code == "#000000" else _variables().get(code, code)


def _variables() -> Mapping[str, str]:
    return {code: f"var(--{role},{code})" for role, code in colours().items()}


def small_image(link: str) -> str:
    """The same pixels as a PNG with a palette, if they have at most 256 colours and are opaque."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(link.removeprefix(PNG_DATA)))).convert("RGBA"))
    codes, places = np.unique(pixels.reshape(-1, 4), axis=0, return_inverse=True)
    if len(codes) > 256 or (codes[:, 3] < 255).any():
        return link
    image = Image.fromarray(places.reshape(pixels.shape[:2]).astype(np.uint8), mode="P")
    image.putpalette(codes[:, :3].tobytes())
    content = io.BytesIO()
    image.save(content, format="PNG", optimize=True)
    return PNG_DATA + base64.b64encode(content.getvalue()).decode()
