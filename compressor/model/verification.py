"""Checks of a finished output by the stock loader, without reading a weight."""

from collections.abc import Collection
from contextlib import redirect_stderr
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, ProcessorMixin
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.auto import get_hf_quantizer

from compressor.checkpoint.reader import TORCH_DTYPES, Checkpoint
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError, reason_of
from compressor.formatting import counted
from compressor.model.architecture import build_meta, expert_counts, load_config
from compressor.model.loading import load_converted, tied_weights
from compressor.model.opened import OpenModel
from compressor.model.remote_code import load_stock, naming_code
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import quiet_transformers
from compressor.records import read_object

GENERATION = "generation_config.json"
LOADERS = (
    "AutoTokenizer",
    "AutoProcessor",
    "AutoImageProcessor",
    "AutoVideoProcessor",
    "AutoFeatureExtractor",
)


def check_carried(folder: Path, original: Path | None = None) -> None:
    """Refuse a folder whose generation config does not load, or whose tokenizer or processor needs
    its own code.

    A tokenizer that does not load for another reason, such as a package that is not installed, is
    refused where the `original` folder's loads."""
    if (folder / GENERATION).is_file():
        try:
            with quiet_transformers():
                GenerationConfig.from_pretrained(str(folder))
        except Exception as error:  # its fields may raise anything
            raise CompressionError(
                f"transformers cannot load {folder / GENERATION} ({reason_of(error)}); mend it, "
                "or remove it from the folder"
            ) from error
    for path in naming_code(folder):
        named = read_object(path).get("auto_map")
        for kind, code in (named if isinstance(named, dict) else {LOADERS[0]: named}).items():
            cause = _loading_error(kind, folder)
            if cause is not None and not isinstance(cause, ImportError):
                raise CompressionError(
                    f"{path} names code of its own for the {kind.removeprefix('Auto').lower()} "
                    f"({code}), which is neither run nor carried, and stock transformers loads "
                    f"none without it ({reason_of(cause)}); save it there in a stock form, such as "
                    "a tokenizer.json, or move its files away and to the output"
                )
    if original is None:
        return
    cause = _loading_error(LOADERS[0], folder)
    if cause is not None and _loading_error(LOADERS[0], original) is None:
        raise CompressionError(
            f"the written tokenizer does not load, though the source's does ({reason_of(cause)}); "
            "please report this model"
        )


def _loading_error(kind: str, folder: Path) -> BaseException | None:
    """Return the error of loading a folder's tokenizer or processor without its own code; None if
    it loads."""
    try:
        if kind == LOADERS[0]:
            load_tokenizer(folder)
        elif kind in LOADERS:
            loaded = load_stock(kind, folder)
            if kind == "AutoProcessor" and not isinstance(loaded, ProcessorMixin):
                return CompressionError(f"a {type(loaded).__name__} in its place")
    except Exception as error:  # tokenizers and processors raise anything
        return error.__cause__ or error
    return None


def verify_checkpoint(folder: Path, experts: int | None, known: Collection[str]) -> Checkpoint:
    """Check every file and tensor of a checkpoint against the stock model, whose layers must have
    so many `experts`.

    Tensors `known` not to belong to it are ignored. Returns the checkpoint; raises
    `CompressionError` naming the file, tensor or field that is wrong."""
    checkpoint = Checkpoint(folder)
    config = load_config(folder)
    model = build_meta(config)
    for name, count in expert_counts(model).items():
        if experts not in (None, count):
            raise CompressionError(
                f"the written config builds {name} with {count} experts instead of {experts}"
            )
    if checkpoint.quantization:
        source = ModelSource.of(folder)
        device = torch.device("cpu")
        opened = OpenModel.of(source, checkpoint, config, torch.bfloat16, device)
        verify_quantized(opened, known)
    else:
        verify_plain(checkpoint, model, known)
    return checkpoint


def verify_plain(checkpoint: Checkpoint, model: Any, known: Collection[str] = ()) -> None:
    """Check plain tensors by loading meta tensors of the same names, shapes and dtypes with the
    stock loader.

    Tensors `known` not to belong to the stock model are ignored.
    """
    for name, info in checkpoint.tensors.items():
        if info.dtype not in TORCH_DTYPES and name not in known:
            raise CompressionError(
                f"the written tensor {name!r} is {info.dtype}, which stock loaders do not read"
            )
    wanted = {key: value.dtype for key, value in model.state_dict().items()}
    report = _load_on_meta(model, checkpoint, known)
    for key, stored, expected in sorted(report.mismatched_keys):
        raise CompressionError(
            f"the written tensor {key!r} has shape {list(stored)}, the new config asks for "
            f"{list(expected)}"
        )
    loaded = wanted.keys() - report.missing_keys
    missing = report.missing_keys - tied_weights(model, loaded, lambda *_: True).keys()
    wrong = missing or report.unexpected_keys or set(report.conversion_errors)
    if wrong:
        how = "missing" if missing else "not understood"
        raise CompressionError(
            f"the written tensors do not fit the new config: {min(wrong)!r} is {how}"
        )
    for key, value in model.state_dict().items():
        if value.is_floating_point() != wanted[key].is_floating_point:
            raise CompressionError(
                f"the written tensor {key!r} is {value.dtype}, the model has {wanted[key]}"
            )


def _load_on_meta(
    model: Any, checkpoint: Checkpoint, known: Collection[str], quantizer: Any = None
) -> Any:
    """Load meta tensors of the names, shapes and dtypes of all stored ones that are not `known`;
    return the report."""
    state = {
        name: torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")
        for name, info in checkpoint.tensors.items()
        if name not in known
    }
    conversions = get_model_conversion_mapping(model, None, quantizer)
    for conversion in conversions:
        if getattr(conversion, "force_cpu", False):
            conversion.force_cpu = False  # only shapes are converted
    return load_converted(model, state, torch.device("meta"), conversions, hf_quantizer=quantizer)


def stock_report(model: OpenModel) -> str | None:
    """Return a sentence on tensors of a compressed-tensors checkpoint that the stock loader
    reports; None without any.

    It is given names, shapes and dtypes alone. Tensors that are not the stock model's don't count.
    """
    from loguru import logger as loguru  # of compressed-tensors

    stock = f"transformers {transformers.__version__}"
    loguru.disable("compressed_tensors")
    try:
        with quiet_transformers(), redirect_stderr(StringIO()):  # compressed-tensors shows progress
            quantizer, config, _ = get_hf_quantizer(deepcopy(model.config), None, None, True, {})
            built = build_meta(config, model.partial.dtype)
            quantizer.preprocess_model(built, dtype=model.partial.dtype)
            report = _load_on_meta(built, model.checkpoint, model.layout.left_out, quantizer)
            built._adjust_missing_and_unexpected_keys(report)
    except Exception as error:  # integrations raise anything
        return f"{stock} does not load it: {reason_of(error)}"
    finally:
        loguru.enable("compressed_tensors")
    # widths of packed weights, whose stored shapes it does not see, may be inexact: mismatches
    # don't count
    found = {
        "can't convert": report.conversion_errors.keys(),
        "finds nothing stored for, and draws at random,": report.missing_keys
        - built.all_tied_weights_keys.keys(),
        "has no place for": report.unexpected_keys,
    }
    for what, names in found.items():
        if names:
            return f"{stock} {what} {counted(len(names), 'tensor')}, such as {min(names)}"
    return None


def verify_quantized(model: OpenModel, known: Collection[str] = ()) -> None:
    """Check quantised tensors: each has a role and the model's number of experts, and none is
    missing.

    Tensors `known` not to belong to the stock model are ignored.
    """
    partial = model.partial
    experts = {layer.name: layer.experts for layer in model.architecture.layers}
    unknown = sorted(set(model.layout.left_out) - set(known))
    if unknown:
        raise CompressionError(
            f"the written tensor {unknown[0]!r} does not belong to the new model"
        )
    for name, role in model.layout.roles.items():
        shape = model.checkpoint.tensors[name].shape
        if role.kind == "fused" and shape[role.dim] != experts[role.layer] + role.extra:
            raise CompressionError(
                f"the written tensor {name!r} has shape {list(shape)}, its dimension {role.dim} "
                f"should be {experts[role.layer] + role.extra}"
            )
    for key in partial.missing:
        raise CompressionError(f"no written tensor fills {key!r}")
