"""A comparison as files: comparison.json, a table for GitHub in comparison.md, and a picture, comparison.png."""

import json
from pathlib import Path

from compressor.comparison.document import comparison_blocks
from compressor.comparison.picture import active_figure, comparison_figure
from compressor.comparison.rows import Comparison, with_active
from compressor.document.markdown import markdown
from compressor.drawing.picture import png
from compressor.files import whole_folder

NAMES = ("comparison.json", "comparison.md", "comparison.png", "active.png")  # the last where top-k varies


def write_reports(comparison: Comparison, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write JSON, Markdown and picture into a new folder, all of them or, when anything fails, nothing.

    With `overwrite` an earlier comparison is replaced once the new one is complete, and stays when anything fails.
    """
    with whole_folder(folder, NAMES, overwrite) as made:
        figures = [comparison_figure(comparison), *([active_figure(comparison)] if with_active(comparison) else [])]
        text = markdown(comparison_blocks(comparison), {figure.name: f"{figure.name}.png" for figure in figures})
        content = json.dumps(comparison.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        (made / NAMES[0]).write_text(content + "\n", encoding="utf-8")
        (made / NAMES[1]).write_text(text, encoding="utf-8")
        for figure in figures:
            (made / f"{figure.name}.png").write_bytes(png(figure.title, figure.drawings))
    return [folder / name for name in NAMES[: 2 + len(figures)]]
