"""`plan`, `apply` and `compress`: the commands that make models smaller."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import compressor
from compressor.cli.commands.bars import progress_bars
from compressor.cli.commands.exporting import onnx_alone, onnx_beside, read_formats
from compressor.cli.commands.gating import MAX_DROP, compress_under_gate
from compressor.cli.commands.invocation import command_line
from compressor.cli.commands.publishing import check_access, push_made
from compressor.cli.options import (
    AsJson,
    BatchSize,
    Calibration,
    Confidence,
    Correct,
    Device,
    Dtype,
    Experts,
    IncludePath,
    Inconclusive,
    Length,
    Limit,
    MaxDrop,
    Merge,
    Model,
    NoMergeRouters,
    Out,
    Overwrite,
    PerSource,
    Protect,
    Ratio,
    Representation,
    Revision,
    Samples,
    Seed,
    Sequential,
    Settings,
    Similarity,
    StrategyName,
    gate_request,
    listed,
    settings,
    treat_inconclusive,
)
from compressor.errors import CompressionError


def plan(
    model: Model,
    output: Out,
    experts: Experts = None,
    ratio: Ratio = None,
    strategy: StrategyName = None,
    merge: Merge = None,
    no_merge_routers: NoMergeRouters = False,
    representation: Representation = None,
    similarity: Similarity = None,
    option: Settings = None,
    calibration: Calibration = None,
    correct: Correct = None,
    sequential: Sequential = False,
    protect: Protect = None,
    per_source: PerSource = False,
    samples: Samples = 128,
    sequence_length: Length = 512,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Decide what to do with every expert and write it as JSON; no weight is written."""
    from compressor.cli import rendering
    from compressor.planning.request import DEFAULT_STRATEGY, Request
    from compressor.plans.files import check_files, source_files, write_plans

    sources = Request(calibration=calibration or None).source_names if per_source else ()
    outputs = [output, *source_files(output, sources)]
    check_files(outputs, overwrite)
    chosen = DEFAULT_STRATEGY if strategy is None else strategy
    with progress_bars(as_json) as progress:
        request: dict[str, Any] = {
            "experts": experts,
            "ratio": ratio,
            "strategy": chosen,
            "options": settings(chosen, merge, no_merge_routers, representation, similarity, option),
            "calibration": calibration or None,
            "correct": correct,
            "sequential": sequential,
            "protect": protect,
            "samples": samples,
            "sequence_length": sequence_length,
            "seed": seed,
            "device": device,
            "dtype": dtype,
        }
        if per_source:
            made = compressor.plan_per_source(model, revision=revision, progress=progress, **request)
        else:
            made = [compressor.plan(model, revision=revision, progress=progress, **request)]
        write_plans(outputs, made)
    rendering.show_plans(made, outputs, as_json)


def apply(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan made by `moe-compress plan`.")],
    output: Out,
    model: Annotated[str | None, typer.Option(help="The source checkpoint, if it is not where the plan says.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Carry out a plan and write the smaller checkpoint."""
    from compressor.cli import rendering

    with progress_bars(as_json) as progress:
        summary = compressor.apply(
            plan_file, output, model=model, overwrite=overwrite, progress=progress, command=command_line()
        )
    rendering.show_summary(summary, as_json)


def compress(
    model: Model,
    output: Out,
    experts: Experts = None,
    ratio: Ratio = None,
    strategy: StrategyName = None,
    merge: Merge = None,
    no_merge_routers: NoMergeRouters = False,
    representation: Representation = None,
    similarity: Similarity = None,
    option: Settings = None,
    calibration: Calibration = None,
    correct: Correct = None,
    sequential: Sequential = False,
    protect: Protect = None,
    samples: Samples = 128,
    sequence_length: Length = 512,
    seed: Seed = 0,
    gate: Annotated[
        str | None,
        typer.Option(help="lm-eval tasks, separated by commas: leave the output in place only if it passes them."),
    ] = None,
    max_drop: MaxDrop = None,
    confidence: Confidence = 0.95,
    limit: Limit = None,
    include_path: IncludePath = None,
    batch_size: BatchSize = "auto",
    inconclusive: Inconclusive = None,
    keep_failed: Annotated[
        bool, typer.Option("--keep-failed", help="With --gate: leave the output in place also if it fails.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="With --gate: find the smallest number of experts that passes.")
    ] = False,
    format: Annotated[
        str, typer.Option("--format", help="safetensors, onnx, or both: safetensors,onnx (in the subfolder onnx).")
    ] = "safetensors",
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPO_ID", help="Publish the output there; with --gate only if it passes.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push-to-hub: to a private repository.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Plan and apply in one go; an interrupted run goes on when the same command is run again."""
    from compressor.cli import rendering
    from compressor.planning.request import DEFAULT_STRATEGY

    chosen = DEFAULT_STRATEGY if strategy is None else strategy
    request: dict[str, Any] = {
        "revision": revision,
        "overwrite": overwrite,
        "experts": experts,
        "ratio": ratio,
        "strategy": chosen,
        "options": settings(chosen, merge, no_merge_routers, representation, similarity, option),
        "calibration": calibration or None,
        "correct": correct,
        "sequential": sequential,
        "protect": protect,
        "samples": samples,
        "sequence_length": sequence_length,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "command": command_line(),
    }
    formats = read_formats(format)
    if push_to_hub is not None:
        check_access(push_to_hub, private)
    elif private:
        raise CompressionError("--private goes with --push-to-hub; name the repository")
    if gate is not None:
        names = listed(gate, "--gate") or ()
        wanted = gate_request(
            names,
            MAX_DROP if max_drop is None else max_drop,
            confidence,
            limit,
            include_path,
            batch_size,
            device,
            "auto",
        )
        decided = treat_inconclusive(inconclusive)
        compress_under_gate(
            model, output, wanted, decided, keep_failed, search, as_json, formats, request, push_to_hub, private
        )
    if keep_failed or search:
        raise CompressionError("--keep-failed and --search go with --gate; name the tasks to pass")
    with progress_bars(as_json) as progress:
        if formats == ("onnx",):
            with onnx_alone(output, overwrite, progress) as between:
                summary = compressor.compress(model, between, progress=progress, **{**request, "overwrite": True})
        else:
            beside = onnx_beside(formats, progress)
            summary = compressor.compress(model, output, progress=progress, accept=beside, **request)
    pushed = None if push_to_hub is None else push_made(output, push_to_hub, private, None, as_json)
    rendering.show_summary(replace(summary, out=str(output)), as_json, pushed)
