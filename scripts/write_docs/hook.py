"""Put the generated parts of the reference into the site; mkdocs.yml names this file as a hook."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.write_docs import reference


def on_files(files: Files, config: Any) -> Files:
    """Add the page of commands, which is generated as a whole."""
    files.append(File.generated(config, reference.COMMANDS, content=reference.commands_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's Markdown with its generated table in place of the mark."""
    for name, mark, table in reference.TABLES:
        if page.file.src_uri == name:
            markdown = markdown.replace(mark, table())
    return markdown
