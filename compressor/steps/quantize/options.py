"""Options of the step `quantize`, and its number formats: weights in fewer bits, stored as
compressed-tensors store them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from compressor.formatting import known_names
from compressor.model.serving import LLAMA_CPP
from compressor.options import Names, NBytes
from compressor.recipe.step import StepOptions

UNITS = ("experts", "dense")  # of a decoder layer, that each have one format
ROW = -1  # group size of one scale for each row, as others write it
# by name, that can load compressed-tensors
SERVERS = {"vllm": "vLLM", "sglang": "SGLang", LLAMA_CPP: "llama.cpp's converter"}


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """All facts of a number format."""

    bits: int
    servers: tuple[str, ...] = ()  # that load experts in it
    storage: str = "pack-quantized"  # compressed-tensors' name of how it is stored
    group_size: int | None = None  # None leaves it to the user
    preset: str | None = None  # compressed-tensors' scheme, where it has one
    clipped: bool = False  # a smaller range may gain something


# Servers were read on 2026-11-25; checkpoint/loader_fault.py asks transformers itself.
# vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe/
# compressed_tensors_moe.py: WNA16 of 4 and 8 bits alone (WNA16_SUPPORTED_BITS), MXFP4, NVFP4 with
# activations as they are, FP8.
# python/sglang/srt/layers/quantization/compressed_tensors/compressed_tensors.py (get_moe_scheme):
# WNA16 and FP8; NVFP4 with activations as they are from 0.5.22 on.
# llama.cpp's conversion/base.py (dequant_model, _generate_nvfp4_tensors), which dequantises: no
# MXFP4, no 3 bits, NVFP4 of experts only under some names, and integers only in groups.
FORMATS: Mapping[str, NumberFormat] = {
    "fp8": NumberFormat(8, (*SERVERS,), "float-quantized", ROW, "FP8_DYNAMIC"),
    "int8": NumberFormat(8, (*SERVERS,)),
    "int4": NumberFormat(4, (*SERVERS,), clipped=True),
    "int3": NumberFormat(3, clipped=True),
    "int2": NumberFormat(2, (LLAMA_CPP,), clipped=True),
    "mxfp4": NumberFormat(4, ("vllm",), "mxfp4-pack-quantized", 32, "MXFP4A16"),
    "nvfp4": NumberFormat(
        4, ("vllm", "sglang"), "nvfp4-pack-quantized", 16, "NVFP4A16", clipped=True
    ),
}


def loaders(scheme: str, by_row: bool) -> list[str]:
    """Return the servers that load experts in a format, with scales by row or by group."""
    servers = {*FORMATS[scheme].servers}
    if by_row and scheme.startswith("int"):
        servers.discard(LLAMA_CPP)
    return [name for server, name in SERVERS.items() if server in servers]


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

    bits: float | None = Field(None, gt=0)
    """Bits of a weight on average, scales included: each layer's experts, and with targets all its
    other matrices, get the format that costs least, measured on calibration text."""
    bytes: NBytes | None = None
    """Bytes of the whole output instead: 16GB, 500MB or a number."""
    servers: Names = ()
    """Servers that have to load the formats that bits or bytes choose: vllm, sglang, llama.cpp;
    for the last, llama-quantize.txt holds a command of llama-quantize."""
    layers: Mapping[str, Mapping[str, str]] | None = None
    """Formats that were chosen, by decoder layer, then for its experts and what is dense:
    {model.layers.0: {experts: int3/64, dense: int8/64}}."""

    @property
    def by_layer(self) -> bool:
        """True if layers may get different formats."""
        return not (self.bits is None and self.bytes is None and self.layers is None)

    @field_validator("servers")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in SERVERS:
                raise ValueError(f"there is no server {name!r}; {known_names(name, SERVERS)}")
        return names

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        given = [name for name in ("bits", "bytes", "layers") if getattr(self, name) is not None]
        # a plan's options hold defaults, too
        fields = type(self).model_fields
        given += [
            name for name in ("scheme", "group_size") if getattr(self, name) != fields[name].default
        ]
        if self.by_layer and len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; bits choose the formats")
        if self.servers and not self.by_layer:
            raise ValueError("servers goes with bits or bytes, which choose formats")
        return self

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
