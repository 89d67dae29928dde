"""What a user asks for. Each field documents its option of the command line, which must not load torch for its help."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.data.sources import DEFAULT_SOURCE, WeightedSource, parse_sources, short_names
from compressor.errors import CompressionError
from compressor.run_record import versions

if TYPE_CHECKING:
    from compressor.model.opened import OpenModel

AUTO, GRAPH = "auto", "graph:"
KEEP, STRATEGY, CALIBRATION = "What to keep", "Strategy", "Calibration"
TRAINING, LOSS = "Training", "Loss"
CORRECTION, GATE, ROUTING, PUBLISHING, RUNNING = "Correction", "Gate", "Routing", "Publishing", "Running"
PANELS = (KEEP, STRATEGY, CALIBRATION, TRAINING, LOSS, CORRECTION, GATE, ROUTING, PUBLISHING, RUNNING)  # in this order
DEFAULT_LENGTH = 512
KEEP_HEADS, DROP_HEADS = "keep", "drop"  # what is done with multi-token-prediction heads
BUDGETS = ("even", "uneven")
MONE = "mone"  # the format in which constants stand for what is dropped


def described(default: Any, panel: str | None, text: str, **more: Any) -> Any:
    """A field with the help of its option and the panel it is shown in; `more` is what `typer.Option` takes.

    `name` calls the option otherwise than the field, `kind` is what the command line gives where that is less.
    """
    return field(default=default, metadata={"help": text, "panel": panel, **more})


@dataclass(frozen=True, slots=True)
class Request:
    """What to plan, apart from the model: everything that decides the result."""

    experts: int | None = described(None, KEEP, "Experts to keep in every MoE layer.")
    ratio: float | None = described(None, KEEP, "Share of the experts to remove; no more than this goes.")
    experts_total: int | None = described(
        None, KEEP, "With --format mone: experts to keep over all MoE layers, which then keep different numbers."
    )
    budget: str | None = described(
        None, KEEP, "With --format mone: even (as many in every layer) or uneven (fewer where the model loses least)."
    )
    constants: bool = False  # whether constants stand for what is dropped: --format mone
    protect: str | Sequence[Mapping[str, Any]] | None = described(
        None,
        KEEP,
        "Experts that are neither merged nor dropped: auto (the hubs), graph:N (the N that stand highest in the "
        "routing graph), or a JSON list of experts to keep (hubs.json of `moe-compress attribute`).",
        kind=str | None,
    )
    split: int | None = described(
        None,
        KEEP,
        "Parts that each expert is split into first, exactly; --experts then counts parts (default: 2 for auto where "
        "nothing speaks against it, otherwise 1).",
        min=1,
    )
    split_by: str = described(
        "energy", KEEP, "How its neurons are dealt out: energy, or clusters (those that fire together)."
    )
    top_k: int | None = described(
        None, KEEP, "Experts that a token visits in the output, at most so many as now (default: as many).", min=1
    )
    mtp: str | None = described(
        None,
        KEEP,
        "Multi-token-prediction heads: keep (with as many experts as the other layers) or drop (default: keep where "
        "the layout is known).",
    )
    strategy: str = described("auto", STRATEGY, "How experts are chosen and merged; see `moe-compress strategies`.")
    options: Mapping[str, Any] = field(default_factory=dict)  # of the strategy, which checks them
    sequential: bool = described(
        False, STRATEGY, "Plan each layer on what the compressed earlier layers put out.", name="--sequential"
    )
    calibration: str | Sequence[str] | None = described(
        None,
        CALIBRATION,
        "A text or JSONL file, a data set id (default: C4), or 'demo'; repeat it for several sources, each with "
        "=WEIGHT if they should not count alike.",
        kind=list[str] | None,
    )
    samples: int = described(128, CALIBRATION, "Calibration sequences.", min=1)
    sequence_length: int = described(DEFAULT_LENGTH, CALIBRATION, "Tokens in each of them.", min=2)
    seed: int = described(0, CALIBRATION, "For the choice of calibration text and everything else that is drawn.")
    correct: str | None = described(
        None,
        CORRECTION,
        "Refit what is left: none, ridge or tune (default: tune for auto, none for the others); with --format mone "
        "constants, too (default: none).",
    )
    deterministic: bool = described(
        False,
        CORRECTION,
        "Keep to operations that give the same bits each time; on a GPU some are slower.",
        name="--deterministic",
    )
    bake: str | None = described(
        None,
        CORRECTION,
        "Then move the routers toward the original on text: none, router (their weights), bias "
        "(one for each expert) or auto (the better one; default: none).",
    )
    bake_rounds: int = described(4, CORRECTION, "Gradients that --bake takes, each on its share of the text.", min=1)
    bake_sequences: int = described(400, CORRECTION, "Sequences of 256 tokens that --bake reads; 48 more judge.", min=1)
    recover: str | None = described(
        None,
        CORRECTION,
        "Then train toward the original on text: none, experts, router, lora or all (default: none).",
    )
    recover_steps: int = described(400, CORRECTION, "With --recover: steps of 2,048 tokens.", min=1)
    recover_stream: bool = described(
        False, CORRECTION, "With --recover: train with one layer in memory at a time.", name="--recover-stream"
    )
    device: str = described("auto", RUNNING, "auto, cpu, cuda, cuda:1 ...")
    dtype: str = described("auto", RUNNING, "For computing: auto (the checkpoint's), float32, bfloat16 or float16.")

    def __post_init__(self) -> None:
        from compressor.recipe.plan_json import few, refuse_floods
        from compressor.steps.correct.refit import CONSTANTS, METHODS  # here, since torch comes with them

        if self.correct is not None and self.correct not in (*METHODS, CONSTANTS):
            raise CompressionError(f"there is no correction {self.correct!r}; known are {', '.join(METHODS)}")
        if self.mtp not in (None, KEEP_HEADS, DROP_HEADS):
            raise CompressionError(f"--mtp {self.mtp!r} should be {KEEP_HEADS} or {DROP_HEADS}")
        if self.bake is not None:
            from compressor.steps.routers.bake import METHODS as BAKES
            from compressor.steps.routers.bake import Bake

            if self.bake not in (known := ("none", *BAKES)):
                raise CompressionError(f"there is no bake {self.bake!r}; known are {', '.join(known)}")
            if self.bakes:
                Bake(self.bake, self.bake_rounds, self.bake_sequences)  # which refuses what is out of range
        if self.recover is not None:
            from compressor.steps.distill.options import METHODS as RECOVERIES

            if self.recover not in (methods := ("none", *RECOVERIES)):
                raise CompressionError(f"there is no recovery {self.recover!r}; known are {', '.join(methods)}")
        if self.budget not in (None, *BUDGETS):
            raise CompressionError(f"there is no budget {self.budget!r}; known are {', '.join(BUDGETS)}")
        if self.central == 0:
            raise CompressionError(f"--protect {self.protect} should be graph:N with a whole number N above 0")
        refuse_floods(self.samples, self.sequence_length)
        if not isinstance(self.calibration, str | None):
            few(self.calibration, "calibration")
        if not 0 <= self.seed < 2**63:
            raise CompressionError(f"--seed {self.seed} is out of range; give a number from 0 to 2**63 - 1")

    @classmethod
    def of(cls, given: "Request | None", wanted: Mapping[str, Any]) -> "Request":
        """The request that was given whole, or one of these fields."""
        if given is not None and wanted:
            raise TypeError("give a Request or its fields, not both")
        return cls(**wanted) if given is None else given

    @property
    def bakes(self) -> bool:
        """Whether the routers are to be moved in the end."""
        return self.bake not in (None, "none")

    @property
    def recovers(self) -> bool:
        """Whether the output is to be trained in the end."""
        return self.recover not in (None, "none")

    @property
    def central(self) -> int | None:
        """N, where the N experts that stand highest in the routing graph are to be protected; 0 for what is no N."""
        if not isinstance(self.protect, str) or not self.protect.startswith(GRAPH):
            return None
        count = self.protect.removeprefix(GRAPH)
        return int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0

    @property
    def protects_what_data_shows(self) -> bool:
        """Whether the protected experts are found on the calibration data, as hubs or in the graph."""
        return self.protect == AUTO or self.central is not None

    @property
    def sources(self) -> tuple[WeightedSource, ...]:
        """The calibration sources with their weights."""
        given = self.calibration
        return parse_sources([DEFAULT_SOURCE] if given is None else [given] if isinstance(given, str) else given)

    @property
    def source_names(self) -> tuple[str, ...]:
        """A short name for each calibration source, without folders."""
        return short_names([entry.source for entry in self.sources])


def _content(name: Any) -> Any:
    """The SHA-256 of a file; what names none stands for itself."""
    is_file = isinstance(name, str) and os.path.isfile(name)
    return hashlib.sha256(Path(name).read_bytes()).hexdigest() if is_file else name


def request_digest(model: "OpenModel", request: Request) -> str:
    """SHA-256 of everything that decides the plan, calibration text and protected experts included."""
    facts = [
        model.fingerprint,
        model.checkpoint.stamp(),
        request.experts,
        request.ratio,
        (request.split, request.split_by, request.top_k),
        request.mtp,
        (request.constants, request.experts_total, request.budget),
        request.strategy,
        sorted(request.options.items()),
        [(_content(entry.source), entry.weight) for entry in request.sources],
        request.samples,
        request.sequence_length,
        request.seed,
        (request.correct, request.deterministic),
        (request.bake, request.bake_rounds, request.bake_sequences),
        (request.recover, request.recover_steps, request.recover_stream),
        request.sequential,
        request.protect if request.protects_what_data_shows else _content(request.protect),
        str(model.partial.device),
        str(model.partial.dtype),
        versions(),
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
