"""Arguments and options that several commands of the command line take, and what their text means."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from compressor.cli.parameters import CALIBRATION, GATE, PUBLISHING, RUNNING, STRATEGY, described
from compressor.errors import CompressionError
from compressor.gates.verdict import Verdict
from compressor.recipe.step import TextOptions

if TYPE_CHECKING:
    from compressor.gates.run import GateRequest

logger = logging.getLogger(__name__)

Model = Annotated[str, typer.Argument(help="A local checkpoint folder or a Hub id such as org/model.")]
Out = Annotated[Path, typer.Option("--output", "-o", help="Where to write.")]


@dataclass(frozen=True, slots=True)
class Running:
    """What commands that read a model and write have in common."""

    revision: str | None = described(None, RUNNING, "Branch, tag or commit of a Hub id.")
    overwrite: bool = described(
        False, RUNNING, "Replace an existing output once the new one is complete.", name="--overwrite"
    )
    as_json: bool = described(False, RUNNING, "Print JSON instead of a table.", name="--json")


@dataclass(frozen=True, slots=True)
class Computing:
    """Where and in which dtype a model computes."""

    device: str = described("auto", RUNNING, "auto, cpu, cuda, cuda:1 ...")
    dtype: str = described("auto", RUNNING, "For computing: auto (the checkpoint's), float32, bfloat16 or float16.")


@dataclass(frozen=True, slots=True)
class TextFlags:
    """Calibration text."""

    calibration: list[str] | None = described(None, CALIBRATION, str(TextOptions.model_fields["data"].description))
    samples: int | None = described(
        None, CALIBRATION, f"{TextOptions.model_fields['samples'].description} (default: 128)", min=1
    )
    sequence_length: int | None = described(
        None, CALIBRATION, f"{TextOptions.model_fields['sequence_length'].description} (default: 512)", min=2
    )
    seed: int | None = described(
        None, CALIBRATION, "For the choice of calibration text and everything else that is drawn (default: 0)."
    )

    def given(self) -> dict[str, Any]:
        """Sources and sizes, as far as they were given."""
        found = {"data": self.calibration, "samples": self.samples, "sequence_length": self.sequence_length}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """Options of the strategy: any by --option, some by a flag of their own."""

    merge: str | None = described(None, STRATEGY, "How grouped experts become one: uniform, max, frequency or learned.")
    no_merge_routers: bool = described(
        False, STRATEGY, "Keep one member's router row instead of merging rows.", name="--no-merge-routers"
    )
    representation: str | None = described(None, STRATEGY, "model-centric: compare surrogate or vectorized weights.")
    similarity: str | None = described(None, STRATEGY, "data-centric: linear-cka, rbf-cka or mean-output.")
    option: list[str] | None = described(
        None, STRATEGY, "name=value for an option of any strategy; may be repeated.", name="--option"
    )

    def given(self, strategy: str) -> dict[str, Any]:
        """The options that were given; the strategy refuses what it does not have."""
        from compressor.grouping.choose import METHODS
        from compressor.recipe.registry import option_fields, read_option

        if all(getattr(self, name) in (None, False) for name in self.__slots__):
            return {}
        known = option_fields(strategy)
        found: dict[str, Any] = {"representation": self.representation, "similarity": self.similarity}
        if self.merge is not None and self.merge not in METHODS:
            raise CompressionError(f"there is no merge {self.merge!r}; known are {', '.join(METHODS)}")
        if "merge" in known:
            found |= {"merge": self.merge, "merge_routers": False if self.no_merge_routers else None}
        elif self.merge is not None or self.no_merge_routers:
            logger.warning("strategy %s drops experts and merges none: --merge has no effect", strategy)
        found |= dict(read_option(text, f"--option {text!r} should be name=value") for text in self.option or ())
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class GateOptions:
    """What a gate is asked for, apart from its tasks."""

    max_drop: float | None = described(
        None,
        GATE,
        "The largest drop of a score to put up with (of a perplexity: its relative rise); by default 0.01, and 0.05 "
        "with --demo.",
    )
    confidence: float | None = described(None, GATE, "Of the gate's verdict, between 0.5 and 1 (default: 0.95).")
    limit: int | None = described(None, GATE, "Items of each task, the first ones (default: all).")
    include_path: Path | None = described(None, GATE, "A folder with lm-eval task files of your own.")
    batch_size: str | None = described(None, GATE, "Of the evaluation: auto or a number (default: auto).")
    stream: bool | None = described(
        None,
        GATE,
        "Evaluate with one layer in memory at a time, or with the whole model (default: streamed where the model does "
        "not fit into memory).",
        name="--stream/--no-stream",
    )
    inconclusive: str | None = described(
        None, GATE, "Let a gate that decides nothing count as pass or fail (default: exit status 3)."
    )

    @property
    def decided(self) -> Verdict:
        """What an inconclusive gate counts as."""
        if self.inconclusive not in (None, "pass", "fail"):
            raise CompressionError(
                f"--inconclusive {self.inconclusive!r} should be pass or fail; leave it out for exit status 3"
            )
        return cast(Verdict, self.inconclusive or "inconclusive")

    def given(self) -> dict[str, Any]:
        """What was given of it that a recipe has, too."""
        names = ("max_drop", "confidence", "limit", "batch_size")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return found | ({} if self.include_path is None else {"include_path": str(self.include_path)})

    def request(
        self,
        tasks: Sequence[str],
        device: str,
        dtype: str = "auto",
        cache_dir: Path | None = None,
        max_drop: float = 0.01,
    ) -> "GateRequest":
        """What a gate is asked for, checked; `max_drop` is the margin where none is given."""
        from compressor.evaluation.tasks import EvaluationOptions, read_batch_size
        from compressor.files import default_folder
        from compressor.gates.run import GateRequest

        options = EvaluationOptions(
            tasks=tuple(tasks),
            limit=self.limit,
            include_path=self.include_path,
            batch_size=read_batch_size(self.batch_size or "auto"),
            device=device,
            dtype=dtype,
            stream=self.stream,
        )
        margin = max_drop if self.max_drop is None else self.max_drop
        return GateRequest(options, margin, self.confidence or 0.95, cache_dir or default_folder())


@dataclass(frozen=True, slots=True)
class UnderGate:
    """How `compress` goes through a gate."""

    gate: str | None = described(
        None, GATE, "lm-eval tasks, separated by commas: leave the output in place only if it passes them."
    )
    keep_failed: bool = described(
        False, GATE, "With --gate: leave the output in place also if it fails.", name="--keep-failed"
    )
    search: bool = described(
        False, GATE, "With --gate: find the smallest number of experts that passes.", name="--search"
    )


@dataclass(frozen=True, slots=True)
class Publishing:
    """Where `compress` publishes what it has made."""

    push_to_hub: str | None = described(
        None, PUBLISHING, "Publish the output there; with --gate only if it passes.", metavar="REPO_ID"
    )
    private: bool = described(False, PUBLISHING, "With --push-to-hub: to a private repository.", name="--private")

    def __post_init__(self) -> None:
        if self.push_to_hub is None and self.private:
            raise CompressionError("--private goes with --push-to-hub; name the repository")


def listed(text: str | None, option: str) -> list[str] | None:
    """'a, b' -> ['a', 'b']; None stays."""
    if text is None:
        return None
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise CompressionError(f"{option} names none; name some, or leave it out for the default")
    return found


def counts(text: str | None, option: str) -> list[int]:
    """'6,4' -> [6, 4]; of nothing, none."""
    return [int(value) for value in _numbers(text, option, int, "whole numbers separated by commas, as 6,4")]


def shares(text: str | None, option: str) -> list[float]:
    """'0.25,0.5' -> [0.25, 0.5]; of nothing, none."""
    return _numbers(text, option, float, "shares separated by commas, as 0.25,0.5")


def _numbers(text: str | None, option: str, kind: type[int] | type[float], wanted: str) -> list[Any]:
    try:
        return [kind(part) for part in listed(text, option) or ()]
    except ValueError as error:
        raise CompressionError(f"{option} {text!r} should be {wanted}") from error
