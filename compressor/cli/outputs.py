"""The commands on outputs: `export` to another format, `generate` text, `report` as a page, `push`
to the Hub."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import compressor
from compressor.answers.options import GenerationOptions
from compressor.cli.options import (
    RUNNING,
    TEXT,
    Fetching,
    Model,
    Out,
    Printing,
    Reading,
    Running,
    flag,
    options_of,
)
from compressor.cli.terminal import print_json, print_report, progress_bars, written_line
from compressor.document.blocks import Block, Facts, Heading, Text
from compressor.entry_points import EXPORTERS, load_installed, read_option
from compressor.errors import CompressionError
from compressor.extras import require
from compressor.files import GRAPH, lock_output, refuse_absent, refuse_no_file
from compressor.formatting import readable
from compressor.options import Options
from compressor.recipe.recipe import SAFETENSORS
from compressor.run_record import COMPRESSION


class OnnxFlags(Options):
    """Options of the built-in ONNX exporter."""

    opset: int | None = None
    """Version of the ONNX operators (default: 20)."""
    dtype: str | None = None
    """Data type of the weights: fp32 or fp16 (default: fp32)."""
    quantize: str | None = None
    """Experts' weights: none (default), int8 (by row) or int4 (by 32)."""
    no_past: bool = False
    """Leave out the KV cache as inputs and outputs."""
    stream: bool | None = None
    """Verify with the graph's weights mapped from their file, or read into memory (default: mapped
    where the model does not fit)."""


def export(
    checkpoint: Model,
    output: Out,
    running: Fetching,
    settings: Annotated[dict[str, Any], options_of(OnnxFlags, "ONNX")],
    format: Annotated[
        str, flag("onnx, keep-list, or the name of another exporter that is installed.")
    ] = "onnx",
    option: Annotated[
        list[str] | None, flag("name=value for an option of the exporter; may be repeated.")
    ] = None,
) -> None:
    """Write a checkpoint in another format, by default as a verified ONNX graph, one layer in
    memory at a time.

    keep-list takes a plan file, too.
    """
    if format != SAFETENSORS:
        exporter = load_installed(EXPORTERS, format)
        takes_folders = hasattr(exporter, "export") and not getattr(exporter, "PLANS", False)
        if takes_folders and not (settings or option):  # what is wrong with these comes first
            refuse_absent(checkpoint)
    if settings.pop("no_past", False):
        settings["past"] = False
    settings |= dict(
        read_option(text, f"--option {text!r} should be name=value") for text in option or ()
    )
    if "overwrite" in settings:
        raise CompressionError("--option overwrite is the option --overwrite; pass that")
    with progress_bars(running.as_json) as progress:
        summary = compressor.export(
            checkpoint,
            output,
            format,
            revision=running.revision,
            overwrite=running.overwrite,
            progress=progress,
            **settings,
        )
    blocks = list[Block]()
    if hasattr(summary, "describe"):
        content, blocks = summary.to_dict(), summary.describe()
        output = summary.folder
    else:
        values = asdict(summary) if is_dataclass(summary) and not isinstance(summary, type) else {}
        facts = {key: str(value) for key, value in values.items()}
        if facts:
            blocks = [Heading(f"Exported as {format}"), Facts(tuple(facts.items()))]
        content = {"format": format, **facts, "folder": str(output)}
    print_report(running.as_json, content, [*blocks, Text(f"Written to {output}")])


def generate(
    folder: Annotated[Path, typer.Argument(help="The folder of an ONNX export.")],
    prompt: Annotated[
        str, typer.Argument(help="The text to continue; - reads it from standard input.")
    ],
    running: Annotated[Running, options_of(Running, RUNNING, ("device", "as_json"))],
    options: Annotated[dict[str, Any], options_of(GenerationOptions)],
) -> None:
    """Continue a prompt with an ONNX export, showing the text as it comes."""
    require("onnxruntime")
    refuse_no_file(folder)
    from compressor.answers.onnx import OnnxModel
    from compressor.answers.prompts import Prompt
    from compressor.checkpoint.source import ModelSource

    text = sys.stdin.read().removesuffix("\n").removesuffix("\r") if prompt == "-" else prompt
    model = OnnxModel(ModelSource.of(folder), running.device)
    asked = Prompt.of(text, where="the prompt")
    continuation = model.continuation(asked, GenerationOptions(**options))
    if not running.as_json:
        for piece in continuation:
            # a prompt injected into the model may make it generate control characters
            print(
                readable(piece).replace("\r", "") if sys.stdout.isatty() else piece,
                end="",
                flush=True,
            )
        print()
        return
    written = "".join(continuation)
    print_json(
        {
            "prompt": text,
            "text": written,
            "prompt_tokens": len(continuation.prompt),
            "tokens": len(continuation.tokens),
            "stopped": continuation.stopped,
            "seconds_to_first_token": continuation.first_seconds,
            "tokens_per_second": continuation.tokens_per_second,
        }
    )


class ReportFlags(Options):
    """What a report shows, and where it is measured."""

    model: str | None = None
    """Source checkpoint, if it has moved."""
    samples: int | None = None
    """Sequences to measure on (default: as many as make 16,384 tokens)."""
    sequence_length: int | None = None
    """Tokens in each, of a text named here."""
    hubs: Path | None = None
    """A hubs.json made by `moe-compress attribute`."""
    gate: Path | None = None
    """The gate's result (default: the newest one of these files)."""
    speed: bool = False
    """Time both models side by side with stock transformers: prefill, decode and memory."""
    no_measure: bool = False
    """Run no model: show what the folder and the record of the run hold."""
    figures: Path | None = None
    """New folder for the page's figures as PNG."""
    experts: int | None = None
    """Groups to show of a model that is not compressed (default: three quarters of its experts)."""


def report(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A folder that compress or apply has written; or a model, with --calibration."
        ),
    ],
    text: Annotated[dict[str, Any], TEXT[:1]],
    running: Reading,
    flags: Annotated[ReportFlags, options_of(ReportFlags)],
    output: Annotated[Path, flag("The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page: changes, sizes, similarities, routed tokens, errors,
    hubs, gate, timings.

    Of a model before compression: the similarity of its experts by several measures, over depth,
    and their groups."""
    require("matplotlib", "jinja2")
    refuse_absent(checkpoint)
    for file in (flags.gate, flags.hubs):
        refuse_no_file(file)
    if text.get("data") and not (checkpoint / COMPRESSION).is_file():
        return _report_base(checkpoint, text["data"], running, flags, output)
    figures = flags.figures
    with progress_bars(running.as_json or flags.no_measure) as progress:
        data, written = compressor.write_report(
            checkpoint,
            output,
            calibration=text.get("data"),
            run_models=not flags.no_measure,
            overwrite=running.overwrite,
            **running.reading(progress),
            **flags.model_dump(exclude={"no_measure", "experts"}),
        )
    if running.as_json:
        typer.echo(data.to_json())
        return
    for sentence in data.missing:
        typer.echo(sentence, err=True)
    line = f"Written to {output}" + (f", {len(written)} figures to {figures}" if figures else "")
    print_report(False, {}, [*([data.speed.table()] if data.speed else []), Text(line)])


def _report_base(
    checkpoint: Path, calibration: Sequence[str], running: Running, flags: ReportFlags, output: Path
) -> None:
    """Write the page of a model before compression."""
    from compressor.report.base_report import (
        FIGURE_NAMES,
        base_blocks,
        compare_experts,
        write_base_page,
    )
    from compressor.report.page import check_report

    check_report(output, flags.figures, running.overwrite, FIGURE_NAMES)
    with lock_output(output), progress_bars(running.as_json) as progress:
        base = compare_experts(
            str(checkpoint),
            calibration=calibration,
            samples=flags.samples,
            sequence_length=flags.sequence_length,
            experts=flags.experts,
            **running.reading(progress),
        )
    written = write_base_page(base, output, flags.figures, running.overwrite)
    blocks = [*base_blocks(base), *written_line([output, *written])]
    print_report(running.as_json, base, blocks)


class PushFlags(Options):
    """How an output is published."""

    private: bool = False
    """Make the repository private; never use a public one."""
    revision: str | None = None
    """Branch to push to; made if missing."""
    create_pr: bool = False
    """Open a pull request instead."""
    message: str | None = None
    """Message of the commit (default: how the model was made)."""
    tag: str | None = None
    """A tag for the commit."""
    dry_run: bool = False
    """Verify and list what would be sent; send nothing."""
    card: Path | None = None
    """New file for the model card, to read before it's sent."""
    require_gate: Path | None = None
    """Push only what passed this gate, and as it was then."""
    base_model: str | None = None
    """The base on the Hub, of a local base, for the card."""
    yes: bool = False
    """Publish what did not pass its gate, too, without being asked."""


def push(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint folder, or one of an ONNX export.")
    ],
    repo_id: Annotated[
        str,
        typer.Argument(
            help="The model on the Hub, as NAMESPACE/NAME, or NAMESPACE/; made if it is missing."
        ),
    ],
    running: Printing,
    flags: Annotated[PushFlags, options_of(PushFlags)],
) -> None:
    """Publish on the Hugging Face Hub: verified anew, with a model card, in one commit (log in: `hf
    auth login`)."""
    for path in (checkpoint, flags.require_gate):
        refuse_no_file(path)
    if (checkpoint / GRAPH).is_file() or (checkpoint / "onnx" / GRAPH).is_file():
        require("onnx")
    if (checkpoint / COMPRESSION).is_file() and not (checkpoint / "README.md").is_file():
        require("matplotlib")  # for the pictures of the card that is written
    from compressor.hub.push import gate_warning
    from compressor.hub.push import push as publish

    yes = flags.yes
    if sys.stdin.isatty() and not (yes or flags.dry_run or flags.require_gate):
        warning = gate_warning(checkpoint)
        yes = warning is not None and typer.confirm(f"{warning} Publish it all the same?", err=True)
    show_hub_bars(running.as_json)
    summary = publish(checkpoint, repo_id, **{**dict(flags), "yes": yes})
    blocks = [*summary.blocks(), *written_line([flags.card] if flags.card else [])]
    print_report(running.as_json, summary.to_dict(), blocks)


def show_hub_bars(as_json: bool) -> None:
    """Keep the bars of the Hub's client to a terminal; transformers' too, which would switch them
    on again."""
    from transformers.utils import logging

    if as_json or not sys.stderr.isatty():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where the environment decides
            logging.disable_progress_bar()
