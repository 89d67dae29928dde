"""Put the generated parts of the reference into the site; mkdocs.yml names this file as a hook.

The page of commands is generated as a whole; the tables of plans and of servers replace a mark in their pages.
"""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import write_cli_reference, write_schema_reference, write_serving_rules


def on_files(files: Files, config: Any) -> Files:
    """Add the page of commands to the files of the site."""
    files.append(
        File.generated(config, write_cli_reference.PAGE, content=write_cli_reference.page())
    )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's Markdown with its generated tables."""
    if page.file.src_uri == write_schema_reference.PAGE:
        return markdown.replace(write_schema_reference.MARK, write_schema_reference.tables())
    if page.file.src_uri == write_serving_rules.PAGE:
        return markdown.replace(write_serving_rules.MARK, write_serving_rules.table())
    return markdown
