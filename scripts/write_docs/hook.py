"""Put the generated parts of the reference into the site; mkdocs.yml names this file as a hook."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.write_docs import reference


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's Markdown with its generated table in place of the mark."""
    for name, mark, table in reference.TABLES:
        if page.file.src_uri == name:
            markdown = markdown.replace(mark, table())
    return markdown
