"""Options of the step `quantize`: weights in fewer bits, stored as compressed-tensors store
them."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from compressor.recipe.step import StepOptions


class Quantize(StepOptions):
    """Store weights in fewer bits, as a compressed-tensors checkpoint."""

    name: ClassVar[str] = "quantize"
    implementation: ClassVar[str] = "compressor.steps.quantize.step:QuantizeStep"
    format: ClassVar[str | None] = "compressed-tensors"
    packages: ClassVar[tuple[str, ...]] = ("compressed_tensors",)

    scheme: Literal["fp8", "int8", "int4", "int3", "int2", "mxfp4", "nvfp4"] = "int4"
    """Number format that weights are rounded to: fp8, int8, int4, int3, int2, mxfp4 or nvfp4."""
    group_size: int | None = Field(None, ge=-1)
    """Columns that share a scale, -1 for a whole row (default: the format's own; of integers the
    largest of 128, 64 and 32 that divides all matrices, else -1)."""
    targets: Literal["experts", "all"] = "experts"
    """Quantise the routed experts, or all: attention and dense layers, too. Routers, norms,
    embeddings and the head stay as they are."""
    method: Literal["rtn", "gptq"] = "rtn"
    """rtn rounds to the nearest number and needs no text; gptq searches for the best range and
    compensates errors on calibration text."""

    @field_validator("group_size")
    @classmethod
    def _of_columns(cls, size: int | None) -> int | None:
        if size == 0:
            raise ValueError(
                "group_size is 0; give the columns that share a scale, or -1 for a whole row"
            )
        return size

    def fault_after(self, earlier: StepOptions) -> str | None:
        reason = "weights are quantised once, after everything that changes them"
        return reason if earlier.format else None
