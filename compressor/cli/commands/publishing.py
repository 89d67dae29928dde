"""`push`: a verified folder on the Hugging Face Hub."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compressor.cli.options import Publishing, Running
from compressor.errors import CompressionError
from compressor.publishing.hub import AGAIN

if TYPE_CHECKING:
    from compressor.publishing.push import PushSummary


def push(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, or one of an ONNX export.")],
    repo_id: Annotated[str, typer.Argument(help="The model on the Hub, as NAMESPACE/NAME; made if it is missing.")],
    running: Annotated[Running, ("as_json",)],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private; never use a public one.")
    ] = False,
    revision: Annotated[str | None, typer.Option(metavar="BRANCH", help="Branch to push to; made if missing.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit (default: how the model was made).")] = None,
    tag: Annotated[str | None, typer.Option(help="A tag for the commit.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Verify and list what would be sent; send nothing.")
    ] = False,
    require_gate: Annotated[
        Path | None, typer.Option(metavar="GATE.JSON", help="Push only what passed this gate, and as it was then.")
    ] = None,
) -> None:
    """Publish on the Hugging Face Hub: verified anew, with a model card, in one commit (log in: `hf auth login`)."""
    from compressor.cli.rendering import show_push
    from compressor.publishing.push import push as publish

    with hub_bars(running.as_json):
        summary = publish(
            checkpoint,
            repo_id,
            private=private,
            revision=revision,
            create_pr=create_pr,
            message=message,
            tag=tag,
            dry_run=dry_run,
            require_gate=require_gate,
        )
    show_push(summary, running.as_json)


def check_access(repo_id: str, private: bool) -> None:
    """Refuse before hours of work what a push after them would be refused for: the name, the login, the repository."""
    from compressor.publishing import push as pushing

    pushing.check_access(repo_id, private)


def push_made(output: Path, publishing: Publishing, require_gate: Path | None, as_json: bool) -> "PushSummary | None":
    """Push what was just made, if that is asked for; a fault says that the output is whole and how to push it alone."""
    if publishing.push_to_hub is None:
        return None
    from compressor.publishing.push import push as publish

    repo_id, private = publishing.push_to_hub, publishing.private
    try:
        with hub_bars(as_json):
            return publish(output, repo_id, private=private, require_gate=require_gate)
    except CompressionError as error:
        alone = f"moe-compress push {output} {repo_id}{' --private' if private else ''}"
        said = str(error)
        if AGAIN in said:
            said = said.replace(AGAIN, f"then run {alone}, which goes on where it stopped")
        else:
            said = f"{said} (then: {alone})"
        raise CompressionError(f"{output} is made and whole, but was not pushed: {said}") from None


@contextmanager
def hub_bars(as_json: bool) -> Iterator[None]:
    """The bars of the Hub's client on a terminal, or none; transformers, which switches them on again, is asked too."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    quiet = as_json or not sys.stderr.isatty()
    own, shown = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the environment decides
        if quiet:
            logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet and own:
            logging.enable_progress_bar()
        elif quiet and shown:
            enable_progress_bars()
