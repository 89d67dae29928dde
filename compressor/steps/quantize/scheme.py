"""Rounding and storing weights: scales, the nearest representable values, and compressed-tensors'
packing.

B matrices at once, O output rows, I input columns, n groups of a row that share a scale: weights
[B, O, I], scales [B, O, n]; all values here are float32. compressed-tensors describes the format
and reads it; scales are those that it computes and tensors those that it packs, bit for bit, made
here where it is slow."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.checkpoint.reader import DTYPE_NAMES, tensor_bytes
from compressor.errors import CompressionError
from compressor.extras import require
from compressor.steps.quantize.options import FORMATS, ROW

GROUPS = (128, 64, 32)  # tried in this order where none is named
# by which clip search scales the range at first, then how far it looks on both sides of the best
FACTORS = (1.0, 0.8, 0.6, 0.4)
STEPS = (0.1, 0.05, 0.025)
AT_ONCE = 2**18  # weights that are computed with at once on a CPU: few enough to stay in the cache
FP4_MAX = 6.0
FP8_MAX = 448.0
FP4 = ("mxfp4", "nvfp4")
LINEAR = ("Linear",)  # compressed-tensors' target of all that is not ignored
MIXED = "mixed-precision"  # compressed-tensors' name of several formats in one checkpoint
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales [B, O, n] of groups as they are stored, and NVFP4's global scale [B, 1, 1], which
    divides them."""

    groups: Tensor
    overall: Tensor | None = None

    @property
    def effective(self) -> Tensor:
        """The factors of stored numbers: [B, O, n]."""
        return self.groups if self.overall is None else self.groups / self.overall


@dataclass(frozen=True)
class Scheme:
    """A scheme by name with the number of columns that share a scale, `ROW` for whole rows."""

    name: str
    group_size: int

    @property
    def bits_per_weight(self) -> float:
        """Bits with those of the scales, in groups of their size."""
        size = 4096 if self.group_size == ROW else self.group_size
        return 8 * self.nbytes(size, size, torch.bfloat16) / size**2

    @property
    def label(self) -> str:
        """Its name in JSON, with the group size where the format leaves that open."""
        fixed = FORMATS[self.name].group_size is not None
        return self.name if fixed else f"{self.name}/{self.group_size}"

    @property
    def bits(self) -> int:
        return FORMATS[self.name].bits

    @property
    def format(self) -> str:
        """The name of the storage in compressed-tensors."""
        return FORMATS[self.name].storage

    @cached_property
    def described(self) -> Any:
        """compressed-tensors' scheme: of FP8 with activations that servers round while they
        compute."""
        require("compressed_tensors")
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationScheme,
            preset_name_to_scheme,
        )

        preset = FORMATS[self.name].preset
        if preset is not None:
            scheme = preset_name_to_scheme(preset, [*LINEAR])
            return scheme.model_copy(update={"format": self.format})
        weights = QuantizationArgs(
            num_bits=self.bits,
            type="int",
            symmetric=True,
            dynamic=False,
            strategy="channel" if self.group_size == ROW else "group",
            group_size=None if self.group_size == ROW else self.group_size,
        )
        return QuantizationScheme(targets=[*LINEAR], weights=weights, format=self.format)

    def stored(
        self, rows: int, columns: int, dtype: torch.dtype
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Safetensors dtype and shape of what is stored for a matrix, by the last part of its
        name."""
        groups = 1 if self.group_size == ROW else columns // self.group_size
        scale = {"mxfp4": "U8", "nvfp4": "F8_E4M3"}.get(self.name, DTYPE_NAMES[dtype])
        stored: dict[str, tuple[str, tuple[int, ...]]] = {"weight_scale": (scale, (rows, groups))}
        if self.name == "fp8":
            return {"weight": ("F8_E4M3", (rows, columns)), **stored}
        if self.name in FP4:
            stored = {"weight_packed": ("U8", (rows, columns // 2)), **stored}
            if self.name == "nvfp4":
                stored["weight_global_scale"] = ("F32", (1,))
            return stored
        packed = "I32", (rows, -(-columns * self.bits // 32))
        return {"weight_packed": packed, **stored, "weight_shape": ("I64", (2,))}

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Return the bytes of a stored matrix."""
        return sum(tensor_bytes(*stored) for stored in self.stored(rows, columns, dtype).values())

    def nearest(self, value: Tensor) -> Tensor:
        """Return the nearest representable number of each, in units of its scale; ties to even, as
        hardware rounds.

        What is given is changed.
        """
        if self.name == "fp8":
            return _nearest_float(value.clamp_(-FP8_MAX, FP8_MAX), 3, -6)
        if self.name in FP4:
            return _nearest_float(value.clamp_(-FP4_MAX, FP4_MAX), 1, 0)
        most = 2 ** (self.bits - 1)
        return value.round_().clamp_(-most, most - 1)

    def codes(self, weight: Tensor, scales: Scales) -> Tensor:
        """Return the numbers [B, O, I] in units of their scales that weights [B, O, I] are rounded
        to."""
        value = (self._grouped(weight) / scales.effective[..., None]).flatten(-2)
        if self.name == "fp8":  # torch rounds alike
            return value.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return self.nearest(value)

    def values(self, codes: Tensor, scales: Scales) -> Tensor:
        """Return the values that are loaded of stored numbers [B, O, I], in float32."""
        value = (self._grouped(codes.float()) * scales.effective[..., None]).flatten(-2)
        # loaders read them in that dtype
        return value.bfloat16().float() if self.name in FP4 else value

    def scales(
        self, weight: Tensor, dtype: torch.dtype, clip: bool = False, largest: Tensor | None = None
    ) -> Scales:
        """Scales of weights [B, O, I] for their range, or, with `clip`, those of least error;
        stored in `dtype`.

        Clip search multiplies each group's range by the factor of least sum |error|^2.5 over the
        group. Integers reach one step further below zero than above: a negative scale turns that
        toward the group's longer side. NVFP4's global scale is that of the `largest` [B] weight, if
        given."""
        most = self.ranges(weight)
        unclipped = self.scales_of(most, dtype, largest)
        if not clip or not FORMATS[self.name].clipped:
            return unclipped
        signs = (1,) if self.name in FP4 else (1, -1)
        chosen = []
        for number, matrix in enumerate(self._grouped(weight)):
            overall = None if unclipped.overall is None else unclipped.overall[number]
            size = max(1, AT_ONCE // weight.shape[-1])
            for grouped, highest in zip(
                matrix.split(size), most[number].split(size), strict=True
            ):  # rows' groups [R, n, g] and their largest weights [R, n]
                best = highest
                scales = highest
                least = torch.full_like(highest, math.inf)
                ranges = [sign * factor * highest for factor, sign in product(FACTORS, signs)]
                for step in (*STEPS, 0):
                    for tried in ranges:
                        stored = self._stored_scales(tried.abs(), overall, dtype).copysign_(tried)
                        effective = Scales(stored, overall).effective[..., None]
                        error = self.nearest(grouped / effective).mul_(effective).sub_(grouped)
                        total = error.abs_().sqrt().mul_(error).mul_(error).sum(-1)
                        is_better = total < least
                        best = torch.where(is_better, tried, best)
                        scales = torch.where(is_better, stored, scales)
                        least = torch.minimum(least, total)
                    ranges = [best - step * highest, best + step * highest]
                chosen.append(scales)
        return Scales(torch.cat(chosen).view_as(most), unclipped.overall)

    def ranges(self, weight: Tensor) -> Tensor:
        """Return the largest absolute weight of each group [B, O, n] of weights [B, O, I] of any
        dtype; NaN for a NaN.

        Without their signs, floating-point numbers are in the order of their bits, which as
        integers are compared fast."""
        bits = INTEGERS[weight.dtype.itemsize]
        ranges = []
        for rows in row_chunks(weight):
            magnitude = rows.contiguous().view(bits) & torch.iinfo(bits).max
            ranges.append(self._grouped(magnitude).amax(-1).view(weight.dtype).float())
        return torch.cat(ranges, dim=1)

    def scales_of(self, most: Tensor, dtype: torch.dtype, largest: Tensor | None) -> Scales:
        """Scales for `ranges` [B, O, n], and for NVFP4's `largest` [B] weights, if given; stored in
        `dtype`."""
        overall: Tensor | None = None
        if self.name == "nvfp4":
            if largest is None:
                largest = most.amax((1, 2))
            overall = (FP8_MAX * FP4_MAX / largest)[:, None, None]
            overall = torch.where(overall.isfinite(), overall, 1.0)
        return Scales(self._stored_scales(most, overall, dtype), overall)

    def _grouped(self, weight: Tensor) -> Tensor:
        size = weight.shape[-1] if self.group_size == ROW else self.group_size
        return weight.view(*weight.shape[:-1], -1, size)

    def _stored_scales(self, most: Tensor, overall: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Scales of groups with these largest weights [B, O, n], as compressed-tensors computes
        them."""
        if self.name == "mxfp4":
            from compressed_tensors.quantization.utils import calculate_qparams

            powers: Tensor = calculate_qparams(-most, most, self.described.weights)[0]
            return powers
        if overall is not None:
            scales = _nearest_float((most / FP4_MAX * overall).clamp_(max=FP8_MAX), 3, -6)
            return scales.masked_fill_(scales == 0, torch.finfo(torch.float8_e4m3fn).eps)
        scales = most / (FP8_MAX if self.name == "fp8" else (2**self.bits - 1) / 2)
        scales = scales.masked_fill_(scales == 0, torch.finfo(torch.float32).eps).to(dtype).float()
        # no range may round to 0
        return scales.clamp_(min=torch.finfo(dtype).tiny * torch.finfo(dtype).eps)

    def pack(self, codes: Tensor, scales: Scales, dtype: torch.dtype) -> dict[str, Tensor]:
        """Stored tensors of B matrices' codes [B, O, I], by the last part of their names: [B, ...]
        each."""
        if self.name == "fp8":
            return {
                "weight": codes.to(torch.float8_e4m3fn),
                "weight_scale": scales.groups.to(dtype),
            }
        if self.name == "mxfp4":
            exponents = scales.groups.log2().round().to(torch.int16) + 127
            return {"weight_packed": _pack_fp4(codes), "weight_scale": exponents.to(torch.uint8)}
        if scales.overall is not None:
            return {
                "weight_packed": _pack_fp4(codes),
                "weight_scale": scales.groups.to(torch.float8_e4m3fn),
                "weight_global_scale": scales.overall.flatten(1),
            }
        columns = codes.shape[-1]
        unsigned = codes.to(torch.int8).view(torch.uint8).add_(2 ** (self.bits - 1))
        padded = pad(unsigned, (0, -columns % 32)) if columns % 32 else unsigned
        packed = _join(padded, self.bits).view(torch.int32)
        return {
            "weight_packed": packed[..., : -(-columns * self.bits // 32)].contiguous(),
            "weight_scale": scales.groups.to(dtype),
            "weight_shape": torch.tensor([codes.shape[1:]] * len(codes)),
        }

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return one stored matrix [O, I] as it is loaded."""
        from compressed_tensors.compressors import BaseCompressor

        compressor = BaseCompressor.get_value_from_registry(self.format)
        weight: Tensor = compressor.decompress(dict(tensors), self.described)["weight"]
        return weight


def quantization_config(
    targets: Mapping[Scheme, Sequence[str]], ignore: Sequence[str]
) -> dict[str, Any]:
    """Return the `quantization_config` of config.json, a group for each scheme with its targets,
    without the modules to `ignore`."""
    from compressed_tensors.quantization import QuantizationConfig

    groups = {}
    for number, (scheme, names) in enumerate(targets.items()):
        groups[f"group_{number}"] = scheme.described.model_copy(update={"targets": [*names]})
    config = QuantizationConfig(
        config_groups=groups,
        ignore=[*ignore],
        format=storage_of(targets),
        quantization_status="compressed",
    )
    content: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    return content


def labels(schemes: Mapping[str, Scheme]) -> dict[str, str]:
    """Return the schemes of a layer's units as JSON has them."""
    return {unit: scheme.label for unit, scheme in schemes.items()}


def storage_of(schemes: Iterable[Scheme]) -> str:
    """Return compressed-tensors' name of the format in which all of these are stored."""
    formats = {scheme.format for scheme in schemes}
    return formats.pop() if len(formats) == 1 else MIXED


def row_chunks(weight: Tensor) -> tuple[Tensor, ...]:
    """Split matrices [B, O, I] by rows, on a CPU into pieces that stay in its cache."""
    rows = weight.shape[1]
    if weight.device.type == "cpu":
        rows = max(1, AT_ONCE // (len(weight) * weight.shape[2]))
    chunks: tuple[Tensor, ...] = weight.split(rows, dim=1)
    return chunks


def _nearest_float(value: Tensor, mantissa: int, lowest: int) -> Tensor:
    """Round float32 to this many bits of mantissa, ties to even; below 2^`lowest`, to multiples of
    the smallest step.

    Casting to 8 bits and back does the same, several times as slowly on a CPU.
    """
    # of two, at or below it
    power = value.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    # float32 has the wanted step there
    anchor = power.clamp_(min=2.0**lowest).mul_(1.5 * 2.0 ** (23 - mantissa))
    return (value + anchor).sub_(anchor).copysign_(value)


def _pack_fp4(codes: Tensor) -> Tensor:
    """Two codes of [B, O, I] in a byte, the first in its low half: sign, and the number's place
    among the eight.

    compressed-tensors does the same, several times as slowly.
    """
    doubled = (codes * 2).to(torch.int8).abs_()  # 0, 1, 2, 3, 4, 6, 8, 12
    beyond_two = (doubled - 4).clamp_(min=0).bitwise_right_shift_(1)
    beyond_four = (doubled - 8).clamp_(min=0).bitwise_right_shift_(2)
    sign = (codes.view(torch.int32) >> 28).to(torch.int8).bitwise_and_(8)
    return _join(doubled.sub_(beyond_two).sub_(beyond_four).add_(sign), 4)


def _join(codes: Tensor, bits: int) -> Tensor:
    """Return bytes [..., I * bits / 8] of codes [..., I] of so many bits, a byte each, the first
    lowest; eight at once.

    compressed-tensors does the same, several times as slowly.
    """
    if bits == 8:
        return codes
    lanes = codes.view(torch.int64)
    for width in (8, 16, 32):
        used = width * bits // 8
        mask = 0  # of the low bits of each field, which is twice as wide
        for start in range(0, 64, 2 * width):
            mask |= (1 << start + 2 * used) - (1 << start)
        lanes = (lanes >> width - used).bitwise_or_(lanes).bitwise_and_(mask)
    if bits in INTEGERS:
        return lanes.to(INTEGERS[bits]).view(torch.uint8)
    joined: Tensor = lanes.view(torch.uint8).unflatten(-1, (-1, 8))[..., :bits].flatten(-2)
    return joined


def scheme_labelled(label: str, columns: Iterable[int]) -> Scheme:
    """Return the scheme of a `Scheme.label`, or of a name alone, for these numbers of columns.

    Raises `CompressionError` for one that is not known, or whose groups do not fit."""
    name, _, size = label.partition("/")
    if name not in FORMATS or not re.fullmatch(r"|-1|[1-9]\d*", size):
        raise CompressionError(
            f"quantize: {label!r} is no number format; known are {', '.join(FORMATS)}, of integers "
            "with the group size behind a slash, as in int4/32"
        )
    return scheme_for(name, int(size) if size else None, columns)


def scheme_for(name: str, group_size: int | None, columns: Iterable[int]) -> Scheme:
    """Return the scheme for matrices of these numbers of columns; where no group size is named, the
    largest usual one.

    Raises `CompressionError` naming the sizes that divide all of them.
    """
    widths = sorted(set(columns))
    common = math.gcd(*widths)
    dividing = [size for size in (256, *GROUPS, 16, 8) if common % size == 0]
    fixed = FORMATS[name].group_size
    if fixed is not None and group_size not in (None, fixed):
        what = "one scale a row (-1)" if fixed == ROW else f"groups of {fixed}"
        raise CompressionError(f"quantize: {name} has {what}; leave group_size out")
    usual = next((size for size in GROUPS if size in dividing), ROW)
    size = fixed or group_size or usual
    if size == ROW or common % size == 0:
        return Scheme(name, size)
    hint = "choose int4 or fp8"
    if fixed is None:
        hint = f"give group_size {' or '.join(map(str, [*dividing, ROW]))}"
    shown = ", ".join(map(str, widths))
    raise CompressionError(
        f"quantize: groups of {size} do not divide matrices of {shown} columns; {hint}"
    )
