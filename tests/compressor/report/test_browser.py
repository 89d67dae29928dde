"""A report's page in a real browser, at the width of a phone and of a desk, in light and in dark."""

import html
import io
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from compressor.report.data import Report
from compressor.report.figures import figures
from compressor.report.page import page
from tests.support.report_data import bare, hostile, report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.full, pytest.mark.skipif(BROWSER is None, reason="no Chromium on the PATH")]
HEIGHT = 12000
SHOWN = ("done", "sizes", "experts", "similarity", "visits", "errors", "hubs", "gate", "cost")
FRAME = """<!DOCTYPE html>
<html style="color-scheme: light dark"><body style="margin: 0">
<iframe id="frame" width="{width}" height="{height}" style="border: 0" srcdoc="{content}"></iframe>
<script>
document.getElementById("frame").onload = event => {{
  const page = event.target.contentDocument, boxes = {{}};
  for (const each of page.querySelectorAll("h1, section, figure, svg, table, nav, pre")) {{
    const box = each.getBoundingClientRect();
    const name = each.id || each.getAttribute("aria-labelledby") || each.tagName + Object.keys(boxes).length;
    boxes[name] = [box.left, box.top, box.width, box.height];
  }}
  const body = event.target.contentWindow.getComputedStyle(page.body);
  const letters = [], touching = [];
  for (const svg of page.querySelectorAll("svg")) {{
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    const texts = [...svg.querySelectorAll("text")].filter(each => each.textContent.trim());
    const places = texts.map(each => each.getBoundingClientRect());
    texts.forEach(each => letters.push(scale * parseFloat(getComputedStyle(each).fontSize)));
    places.forEach((a, at) => places.slice(at + 1).forEach((b, after) => {{
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const up = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      const least = Math.min(a.width * a.height, b.width * b.height);
      if (across > 0 && up > 0 && across * up > 0.25 * least)
        touching.push([texts[at].textContent, texts[at + 1 + after].textContent]);
    }}));
  }}
  const found = {{boxes, letters, touching,
    width: page.documentElement.scrollWidth, colour: body.color, ground: body.backgroundColor,
    tabs: [...page.querySelectorAll("a, summary, [tabindex='0']")].every(each => each.tabIndex >= 0)}};
  document.body.dataset.found = encodeURIComponent(JSON.stringify(found));
}};
</script></body></html>
"""  # windows have a least width, frames have none


@dataclass(frozen=True, slots=True)
class Seen:
    """A page as a browser shows it: RGB [rows, columns, 3], and what a script measured."""

    pixels: np.ndarray
    measured: dict[str, Any]

    def part(self, name: str) -> np.ndarray:
        """The pixels of an element."""
        left, top, width, height = self.measured["boxes"][name]
        return self.pixels[int(top) + 1 : int(top + height) - 1, int(left) + 1 : int(left + width) - 1]


def run(folder: Path, *arguments: str) -> bytes:
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
               f"--user-data-dir={folder / 'profile'}", *arguments]  # fmt: skip
    return subprocess.run(command, capture_output=True, check=True, timeout=120).stdout


def options(width: int, dark: bool) -> list[str]:
    return [f"--window-size={width},{HEIGHT}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]


def measure(folder: Path, content: str, width: int, dark: bool = False) -> dict[str, Any]:
    """Sizes, places and colours of a page that is so wide."""
    file = folder / "frame.html"
    file.write_text(FRAME.format(width=width, height=HEIGHT, content=html.escape(content)), encoding="utf-8")
    shown = run(folder, *options(width, dark), "--dump-dom", file.as_uri()).decode()
    found = re.search(r'data-found="(.*?)"', shown)
    assert found
    measured: dict[str, Any] = json.loads(unquote(found[1]))
    return measured


def see(folder: Path, content: str, width: int, dark: bool) -> Seen:
    """Look at the page and measure it."""
    file, picture = folder / "page.html", folder / "page.png"
    file.write_text(content, encoding="utf-8")
    run(folder, *options(width, dark), f"--screenshot={picture}", file.as_uri())
    pixels = np.asarray(Image.open(io.BytesIO(picture.read_bytes())).convert("RGB")).astype(int)
    return Seen(pixels, measure(folder, content, width, dark))


def channels(colour: str) -> Sequence[int]:
    return [int(part) for part in re.findall(r"\d+", colour)[:3]]


def shades(pixels: np.ndarray) -> int:
    """How many colours there are, of the common ones."""
    _, often = np.unique(pixels @ np.array([65536, 256, 1]), return_counts=True)
    return int((often > 5).sum())


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_page_is_seen_whole(tmp_path: Path, width: int, dark: bool) -> None:
    data = report(2)
    drawn = figures(data)
    seen = see(tmp_path, page(data, drawn), width, dark)
    assert seen.measured["width"] <= width and seen.measured["tabs"]
    assert seen.pixels.shape[1] == width
    ground, ink = channels(seen.measured["ground"]), channels(seen.measured["colour"])
    assert (max(ground) < 60 and min(ink) > 180) if dark else (min(ground) > 240 and max(ink) < 80)
    assert (seen.pixels[2, 2] == ground).all()
    boxes = seen.measured["boxes"]
    for picture in drawn:
        assert shades(seen.part(f"figure-{picture.name}")) > 8
        for number, part in enumerate(picture.drawings):
            name = f"{picture.name}-{number}-title {picture.name}-{number}-desc"
            left, _, across, up = boxes[name]
            scrolls = width < 500 and picture.name == "experts"  # in its own region
            assert across > 100 and up > 20 and left >= 0 and (left + across <= width or scrolls)
            assert across / up == pytest.approx(part.size[0] / part.size[1], rel=0.03)
            assert shades(seen.part(name)) > 3
            assert (seen.part(name).reshape(-1, 3) == ground).all(axis=1).any()  # transparent over the page


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("data", [report(2), report(2, 64, 48)], ids=["small", "large"])
def test_letters_of_drawings_can_be_read(tmp_path: Path, data: Report, width: int) -> None:
    measured = measure(tmp_path, page(data, figures(data)), width)
    assert len(measured["letters"]) > 50 and min(measured["letters"]) >= 7.5
    assert measured["touching"] == []


@pytest.mark.parametrize("data", [bare(), hostile()], ids=["bare", "hostile"])
def test_odd_pages_fit_a_phone(tmp_path: Path, data: Report) -> None:
    measured = measure(tmp_path, page(data, figures(data)), 390)
    assert measured["width"] <= 390
    assert all(left >= 0 and left + width <= 390 for left, _, width, _ in (measured["boxes"][name] for name in SHOWN))
