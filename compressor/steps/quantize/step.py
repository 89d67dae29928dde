"""The step `quantize`: weights in fewer bits, stored as compressed-tensors store them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from compressor.document.blocks import Block, Text
from compressor.formatting import joined
from compressor.recipe.step import Needs, Step

if TYPE_CHECKING:
    from compressor.checkpoint.reader import Size
    from compressor.model.opened import OpenModel
    from compressor.steps.quantize.matrices import Matrices
    from compressor.steps.quantize.scheme import Scheme
    from compressor.steps.quantize.writing import Writer
    from compressor.steps.state import State
    from compressor.steps.tensors import OutputJob

ONCE = "weights are quantised once, after everything that changes them"


class Quantize(Step):
    """Store weights in fewer bits, as a compressed-tensors checkpoint."""

    name: ClassVar[str] = "quantize"
    order: ClassVar[int | None] = 4
    not_after: ClassVar[Mapping[str, str]] = {"quantize": ONCE, "constants": "constants stand for unquantised experts"}
    verified_by_kept: ClassVar[bool] = True

    scheme: Literal["fp8", "int8", "int4", "int3", "int2", "mxfp4", "nvfp4"] = Field(
        "int4", description="Numbers that weights are rounded to: fp8, int8, int4, int3, int2, mxfp4 or nvfp4."
    )
    group_size: int | None = Field(
        None,
        ge=-1,
        description="Columns that share a scale, -1 for a whole row (default: the format's own; of integers the "
        "largest of 128, 64 and 32 that divides all matrices, else -1).",
    )
    targets: Literal["experts", "all"] = Field(
        "experts",
        description="What is quantised: routed experts, or all of attention and dense layers, too; never routers, "
        "norms, embeddings or the head.",
    )
    method: Literal["rtn", "gptq"] = Field(
        "rtn",
        description="rtn rounds to the nearest number and needs no text; gptq searches for the best range and makes "
        "up for errors on calibration text.",
    )

    tune: int = Field(
        0, ge=0, le=10**5, description="Optimizer steps that train each layer of int2 or int3 after gptq (try 120)."
    )

    @field_validator("group_size")
    @classmethod
    def _of_columns(cls, size: int | None) -> int | None:
        if size == 0:
            raise ValueError("group_size is 0; give the columns that share a scale, or -1 for a whole row")
        return size

    @model_validator(mode="after")
    def _tunable(self) -> Self:
        if self.tune and (self.method != "gptq" or self.scheme not in ("int4", "int3", "int2")):
            raise ValueError("tune trains what gptq has rounded to integers; give method gptq and int3 or int2")
        return self

    @property
    def packages(self) -> tuple[str, ...]:
        return ("compressed_tensors",)

    def needs(self, model: "OpenModel", steps: Sequence[Step], planned: bool) -> Needs:
        """Calibration text for GPTQ; refuses groups that do not divide the model's matrices."""
        from compressor.steps.quantize.matrices import refuse_unreadable

        refuse_unreadable(model, self._chosen(model)[1])
        return Needs(text=self.method == "gptq", heldout=int(self.tune > 0), passes=int(self.method == "gptq"))

    def _chosen(self, model: "OpenModel") -> tuple["Matrices", "Scheme"]:
        """A model's matrices, and the scheme with the group size for them."""
        from compressor.steps.quantize.matrices import find_matrices
        from compressor.steps.quantize.scheme import scheme_for

        matrices = find_matrices(model, self.targets)
        return matrices, scheme_for(self.scheme, self.group_size, (matrix.columns for matrix in matrices.every))

    def size(self, model: "OpenModel", experts: int, changed: bool = False) -> tuple["Size", int]:
        """The model's size once quantised, with so many experts in each layer, and bytes of the packed matrices."""
        from compressor.steps.quantize.writing import packed_size

        matrices, scheme = self._chosen(model)
        return packed_size(model, scheme, matrices, experts, changed)

    def plan(self, state: "State") -> Mapping[str, Any]:
        """The format and its effective bits; of a source that was quantised otherwise, that it's dequantised first."""
        from compressor.steps.job import stored_partial

        writer = self._writer(state)
        dtype, every = stored_partial(state.model).dtype, writer.matrices.every
        weights = sum(matrix.rows * matrix.columns for matrix in every)
        nbytes = sum(writer.scheme.nbytes(matrix.rows, matrix.columns, dtype) for matrix in every)
        return {
            "format": writer.scheme.format,
            "group_size": writer.scheme.group_size,
            "matrices": len(every),
            "weights": weights,
            "bits": round(8 * nbytes / weights, 4),
            "dequantized": state.model.layout.quantized,
        }

    def refit(self, state: "State") -> Mapping[int, Mapping[str, Any]]:
        from compressor.steps.quantize.in_order import quantize_in_order

        if self.method == "gptq":
            assert state.text is not None
            quantize_in_order(self._writer(state), state.text.fit, state.progress, self.tune, state.seed)
        return {}

    def job(self, state: "State") -> "OutputJob":
        return self._writer(state).job(state.stage_plan())

    def _writer(self, state: "State") -> "Writer":
        from compressor.steps.quantize.writing import Kept, Writer

        assert state.work is not None
        matrices, scheme = self._chosen(state.model)
        return Writer(state.model, scheme, matrices, Kept(state.work.kept(state.number, "quantized")))

    def describe(self, entry: Mapping[str, Any]) -> Sequence[Block]:
        """Scheme, groups, effective bits, and who loads it."""
        from compressor.model.serving import loaders

        if not (plan := entry.get("plan")):
            return ()
        groups = "one scale a row" if plan["group_size"] == -1 else f"groups of {plan['group_size']}"
        what = "routed experts" if self.targets == "experts" else "experts, attention and dense layers"
        before = ", which were dequantised first," if plan.get("dequantized") else ""
        how = "GPTQ with clip search" if self.method == "gptq" else "rounding to nearest"
        how += f" and {self.tune} steps of training" if self.tune else ""
        servers = loaders(self.scheme, plan["group_size"] == -1)
        loaded = f"which {joined(servers)} load" if servers else "which no server is known to load"
        return (
            Text(
                f"Quantised {what}{before} to {self.scheme} by {how}: {groups}, {plan['bits']:.3g} bits a weight, "
                f"stored as {plan['format']}, {loaded}."
            ),
        )
