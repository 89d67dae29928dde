"""The outcome of a run, and the one record of it in an output folder.

Terminal summary, `--json`, report and model card are made from it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from compressor.checkpoint.reader import Size, quantization_of
from compressor.checkpoint.source import ModelSource
from compressor.data.sources import without_folders
from compressor.document.blocks import Table
from compressor.errors import CompressionError
from compressor.files import RECEIPT, TOOL
from compressor.formatting import human_bytes, human_count, share
from compressor.model.inspection import stock_fault
from compressor.model.opened import OpenModel, advice_on, open_model, served_model
from compressor.model.serving import Advice
from compressor.pipeline.receipt import Receipt, read_receipt
from compressor.quality_gate.domain_divergence import DomainDivergence
from compressor.quality_gate.report import gate_of, read_gate
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.plan import ExpertPlan
from compressor.recipe.steps_plan import QUANTIZE, Plan, PlannedStep
from compressor.records import plain_json, read_as, read_json, read_object, readable_json
from compressor.run_record import COMPRESSION, RunRecord, read_record, versions
from compressor.steps.section import Section, sections


@dataclass(frozen=True, slots=True)
class Attempt:
    """A model that went through the gate."""

    experts: int  # per layer
    result: GateResult
    accepted: bool


# of kept multi-token-prediction heads, before and after
Acceptance = Mapping[str, Mapping[str, Any]]


class SizeRow(NamedTuple):
    """A size before and after."""

    name: str
    before: int  # 0: not known
    after: int
    show: Callable[[float], str]  # for people

    @property
    def left(self) -> str:
        """The remaining share, in percent."""
        return share(self.after, self.before)


def size_rows(
    experts: tuple[int, int],
    before: Size,
    after: Size,
    active: tuple[int, int] | None = None,
) -> list[SizeRow]:
    """Return experts of a layer, parameters, bytes and, where known, active parameters."""
    rows = [
        SizeRow("experts per layer", *experts, str),
        SizeRow("parameters", before.parameters, after.parameters, human_count),
        SizeRow("bytes", before.bytes, after.bytes, human_bytes),
    ]
    return rows if active is None else [*rows, SizeRow("active parameters", *active, human_count)]


def size_table(title: str, rows: Sequence[SizeRow], exactly: bool = False) -> Table:
    """Return the sizes as a table; `exactly` adds columns with all digits."""
    columns = ["", "before", "after", "left"]
    lines = []
    if exactly:
        columns += ["before, exactly", "after, exactly"]
    for row in rows:
        before = (row.show(row.before), f"{row.before:,}") if row.before else ("-", "-")
        left = "" if row is rows[0] and not exactly else row.left
        line = (row.name, before[0], row.show(row.after), left, before[1], f"{row.after:,}")
        lines.append(line[: len(columns)])
    return Table(title, columns, lines)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run, for a person or a script."""

    out: str
    plan: Plan = field(repr=False)
    experts_before: int
    experts_after: int
    before: Size
    after: Size
    seconds: Mapping[str, float]  # by phase; empty where this machine has no record of the run
    peak_memory: int  # bytes of anonymous memory at the highest; 0: not known
    left_out: tuple[str, ...] = ()  # source tensors that the stock model does not load
    zeroed_fields: tuple[str, ...] = ()  # config fields that announced them
    servers: Advice | None = field(default=None, repr=False)
    packed: bool = False  # the output is quantised
    loader_fault: str | None = None  # what stock transformers does wrong with quantised experts
    acceptance: Acceptance = field(default_factory=dict)
    heldout: DomainDivergence | None = None  # of base and output on held-out text, if there is any
    receipt: Receipt | None = field(default=None, repr=False)  # of the same
    versions: Mapping[str, str] = field(default_factory=versions)  # of the packages that made it
    command: tuple[str, ...] | None = None  # that was run; None: not known
    gate: GateResult | None = None  # about these very weights
    # all models that went through the recipe's gate
    attempts: tuple[Attempt, ...] = field(default=(), repr=False)
    reports: tuple[Path, ...] = ()  # files of the gate's reports
    pushed: Any = None  # summary of publishing on the Hub, if the recipe asks for that
    recorded_digest: str = ""  # of the plan, as a folder has it
    # that have another value than in the source
    config_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def expert_plan(self) -> ExpertPlan:
        """The plan for the experts of the base."""
        return self.plan.expert_plan

    @property
    def strategy(self) -> str:
        """The name of the strategy that chose experts."""
        return self.plan.strategy

    @property
    def top_k(self) -> int:
        """Experts that a token is routed to; 0 where no step decided on experts."""
        return max((layer.top_k for layer in self.expert_plan.layers), default=0)

    @property
    def title(self) -> str:
        """The name of the folder."""
        return Path(self.out).resolve().name

    @property
    def steps(self) -> tuple[dict[str, Any], ...]:
        """Entries of the steps that have a result, in order."""
        return tuple(step.to_dict() for step in self.plan.steps if step.result is not None)

    @property
    def sections(self) -> list[Section]:
        """What each step says, in order."""
        return list(sections(self.plan, self.packed))

    @property
    def quantized(self) -> PlannedStep | None:
        """The step that quantised the weights; None if none did, or later ones changed them."""
        entries = [step for step in self.plan.of(QUANTIZE) if step.decision is not None]
        return entries[-1] if entries and self.packed else None

    def sizes(self) -> list[SizeRow]:
        """Return sizes before and after."""
        return size_rows((self.experts_before, self.experts_after), self.before, self.after)

    def facts(self) -> dict[str, Any]:
        """Return what summary and record share, as JSON has it."""
        return {
            "experts": {"before": self.experts_before, "after": self.experts_after},
            "parameters": {"before": self.before.parameters, "after": self.after.parameters},
            "bytes": {"before": self.before.bytes, "after": self.after.bytes},
            "left_out": list(self.left_out),
            "zeroed_fields": list(self.zeroed_fields),
            "config_fields": dict(self.config_fields),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON types, without the plan's layers."""
        content = {
            "output": self.out,
            "source": {"model": self.plan.source.model, "revision": self.plan.source.revision},
            "strategy": self.strategy,
            "top_k": self.top_k,
            **self.facts(),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "peak_memory_bytes": self.peak_memory,
            "command": self.command,
            "protected_experts": sum(map(len, self.expert_plan.protected.values())),
            "plan_digest": self.plan.digest(),
            "calibration": self.plan.calibration,
            "versions": dict(self.versions),
            "servers": None if self.servers is None else asdict(self.servers),
            "loader_fault": self.loader_fault,
            "steps": [
                {"name": step["name"], "options": step["options"], "result": step["result"]}
                for step in self.steps
            ],
        }
        quantized = self.quantized.to_dict() if self.quantized else None
        more = {
            "acceptance": dict(self.acceptance),
            "heldout": self.heldout and plain_json(self.heldout),
            "quantization": quantized and {**quantized["options"], **quantized["plan"]},
            "constants": self.plan.constants,
        }
        return content | {name: value for name, value in more.items() if value}


class GateFailedError(CompressionError):
    """The gate rejected a compressed model, or could not decide and an undecided gate does not
    count as passed.

    Nothing was put in place, unless the recipe's gate has `keep_failed`; then `outcome` is that of
    the output."""

    def __init__(
        self,
        out: Path,
        attempts: Sequence[Attempt],
        status: int = 1,
        outcome: Outcome | None = None,
        reports: Sequence[Path] = (),
    ) -> None:
        self.result = attempts[-1].result  # the gate's
        self.attempts = tuple(attempts)
        self.status = status  # exit status of the command line: 1 failed, 3 undecided
        self.outcome = outcome
        self.reports = tuple(reports)
        left = "was not written" if outcome is None else "is kept all the same"
        super().__init__(f"{out} did not pass the gate ({self.result.verdict}) and {left}")


@dataclass(frozen=True, slots=True)
class _Pair:
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class _Record:
    """The fields of compression.json beside its plan."""

    experts: _Pair
    parameters: _Pair
    bytes: _Pair
    left_out: tuple[str, ...]
    zeroed_fields: tuple[str, ...]
    config_fields: Mapping[str, Any]
    versions: Mapping[str, str]
    plan_digest: str
    heldout: DomainDivergence | None = None


def record_of(outcome: Outcome, files: Sequence[str], label: str, aligned: bool) -> bytes:
    """compression.json: how the output was made. No timings and no folders, so that equal runs give
    equal bytes.

    Rows of experts that are not `aligned` run in the plain loop of stock transformers alone.
    """
    content = outcome.plan.to_dict()
    content["source"]["model"] = label
    if outcome.plan.base is not None:
        content["base"]["model"] = outcome.plan.base.label
    if content["calibration"] is not None:
        content["calibration"] = without_folders(content["calibration"])
    for step in content["steps"]:
        if step.get("text") is not None:
            step["text"] = without_folders(step["text"])
        split = (step.get("plan") or {}).get("split")
        if split is not None and split.get("calibration") is not None:
            described = {**split, "calibration": without_folders(split["calibration"])}
            step["plan"] = {**step["plan"], "split": described}
    record = {
        "tool": TOOL,
        "versions": versions(),
        **outcome.facts(),
        "experts_implementation": None if aligned else "eager",
        "files": sorted(files),
        "plan_digest": outcome.plan.digest(),
        "plan": content,
        "heldout": outcome.heldout and plain_json(outcome.heldout),
    }
    return readable_json(
        {name: value for name, value in record.items() if value is not None}
    ).encode()


def servers_of(model: OpenModel, plan: ExpertPlan) -> Advice | None:
    """Return advice on servers for a planned model; None with constants, which vLLM alone
    serves."""
    if plan.has_constants:
        return None
    layers = model.architecture.layers
    return advice_on(served_model(model), layers, plan.experts or model.architecture.experts)


def is_packed(folder: Path) -> bool:
    """Return True if a folder holds a quantised checkpoint, and not only an export of one."""
    config = folder / "config.json"
    return config.is_file() and bool(quantization_of(folder, read_object(config)))


def fault_of(folder: Path) -> str | None:
    """Return the fault of stock transformers in loading quantised experts; None if none is
    known."""
    if is_packed(folder):
        with suppress(CompressionError):  # as for constants
            return stock_fault(open_model(ModelSource(str(folder), None, folder), device="cpu"))
    return None


def read_plan(path: Path) -> Plan:
    """Return the plan in a plan file, or in the record of an output folder.

    Raises `CompressionError` where there is none.
    """
    return _recorded(path)[1] if path.is_dir() else Plan.load(path)


def _recorded(folder: Path) -> tuple[dict[str, Any], Plan]:
    """Return the record of an output folder, and the plan in it."""
    path = folder / COMPRESSION
    hint = "name a folder that moe-compress has written"
    content = read_json(path, hint, hint)
    if not isinstance(content, dict) or not isinstance(content.get("plan"), dict):
        raise CompressionError(f"{path} holds no plan; {hint}")
    return content, Plan.from_dict(content["plan"], f"{path}: plan")


def read_outcome(folder: Path, gate: Path | GateResult | None = None) -> Outcome:
    """Read the outcome that an output folder records, with this machine's record of the run.

    `gate` is by default the result beside the weights; one about other files is refused. Raises
    `CompressionError` where the folder has no record or a damaged one."""
    content, plan = _recorded(folder)
    record = read_as(_Record, content, f"{folder / COMPRESSION}: ")
    run = read_record(folder) or RunRecord("", None)
    if isinstance(gate, Path):
        gate = read_gate(gate)
    return Outcome(
        out=str(folder),
        plan=plan,
        experts_before=record.experts.before,
        experts_after=record.experts.after,
        before=Size(record.parameters.before, record.bytes.before),
        after=Size(record.parameters.after, record.bytes.after),
        seconds=run.seconds,
        peak_memory=run.peak_memory,
        left_out=record.left_out,
        zeroed_fields=record.zeroed_fields,
        config_fields=record.config_fields,
        packed=is_packed(folder),
        loader_fault=fault_of(folder),
        acceptance=run.acceptance,
        heldout=record.heldout,
        receipt=read_receipt(folder / RECEIPT) if (folder / RECEIPT).is_file() else None,
        versions=record.versions,
        command=run.command,
        gate=gate_of(folder, gate),
        recorded_digest=record.plan_digest,
    )
