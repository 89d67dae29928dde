"""Adapters on disk: their settings and the layers they stand beside in comoe.json, tensors in adapters.safetensors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressor.checkpoint.reader import read_header
from compressor.comoe.layer import Model, comoe_layers, inject_config, refuse_injected, targeted
from compressor.comoe.options import ComoeConfig
from compressor.errors import CompressionError
from compressor.files import whole_folder
from compressor.records import RESTORE, plain_json, read_as, read_json

FACTS, TENSORS = "comoe.json", "adapters.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What adapters are, which layers they stand beside, and how they came about."""

    config: ComoeConfig
    layers: Mapping[str, tuple[int, int]]  # features into and out of each linear layer
    model: str = ""  # that they were trained on
    training: Mapping[str, Any] | None = None
    format: Literal["moe-compressor-comoe/1"] = "moe-compressor-comoe/1"


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Router, A and B of every layer with experts, by state-dict key: float32, on the CPU."""
    return {
        f"{name}.{part}": getattr(layer, part).detach().cpu().contiguous()
        for name, layer in comoe_layers(model).items()
        for part in ("router", "down", "up")
    }


def write_adapters(model: nn.Module, folder: Path, label: str = "", training: Mapping[str, Any] | None = None) -> None:
    """Both files into a folder that exists; raises `CompressionError` for a model without experts."""
    experts = comoe_layers(model)
    if not experts:
        raise CompressionError("the model has no LoRA experts to save; put some in with inject")
    layers = {name: (layer.base.in_features, layer.base.out_features) for name, layer in experts.items()}
    facts = AdapterFacts(next(iter(experts.values())).config, layers, label, training)
    (folder / FACTS).write_text(json.dumps(plain_json(facts), indent=2) + "\n", encoding="utf-8")
    save_file(adapter_tensors(model), folder / TENSORS, metadata={"format": "pt"})


def save_adapters(model: nn.Module, folder: str | Path, overwrite: bool = False) -> None:
    """Write the adapters of an injected model into a new folder, all of it or, when anything fails, nothing."""
    with whole_folder(Path(folder), (FACTS, TENSORS), overwrite) as fresh:
        write_adapters(model, fresh)


def read_facts(folder: Path) -> AdapterFacts:
    """What adapters in a folder are; raises `CompressionError` where there are none."""
    if not (folder / FACTS).is_file() or not (folder / TENSORS).is_file():
        raise CompressionError(
            f"{folder} holds no {FACTS} with {TENSORS}; name a folder that `moe-compress comoe train` has written"
        )
    return read_as(AdapterFacts, read_json(folder / FACTS, RESTORE, RESTORE), str(folder / FACTS))


def load_adapters(model: Model, folder: str | Path) -> Model:
    """Put the experts of a folder into a model, which is changed in place and returned.

    Raises `CompressionError` where the model lacks the layers that they were trained beside, or a file is damaged; the
    model is then as it was.
    """
    path = Path(folder) / TENSORS
    facts = read_facts(Path(folder))
    config, trained_on = facts.config, f" ({facts.model})" if facts.model else ""
    refuse_injected(model)
    linear = {name: (layer.in_features, layer.out_features) for name, layer in targeted(model, config.targets).items()}
    for name in dict.fromkeys((*facts.layers, *linear)):
        wanted, present = facts.layers.get(name), linear.get(name)
        if wanted != present:
            here = "lacks it" if present is None else f"has one of {present[0]} by {present[1]} features"
            there = f"of {wanted[0]} by {wanted[1]} features" if wanted else "without one"
            raise CompressionError(
                f"the adapters in {folder} were trained on another model{trained_on}: there layer {name!r} is {there}, "
                f"this model {here}; name the model that they were trained on"
            )
    shapes = dict[str, tuple[int, ...]]()
    for name, (into, out) in facts.layers.items():
        shapes[f"{name}.router"] = (config.experts, into)
        shapes[f"{name}.down"] = (config.experts, config.rank, into)
        shapes[f"{name}.up"] = (config.experts, out, config.rank)
    header = read_header(path)
    stored = {name: tuple(info.shape) for name, info in header.items() if info.dtype == "F32"}
    if odd := next((name for name in sorted({*shapes, *header}) if shapes.get(name) != stored.get(name)), None):
        raise CompressionError(f"tensor {odd!r} of {path} does not fit the {FACTS} beside it; {RESTORE}")
    tensors = load_file(path)
    if odd := next((name for name, value in tensors.items() if not bool(value.isfinite().all())), None):
        raise CompressionError(f"tensor {odd!r} of {path} holds NaN or infinity; train the adapters again")
    inject_config(model, config).load_state_dict(tensors, strict=False)  # strict would miss the model's own tensors
    return model
