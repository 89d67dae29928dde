"""Adapters on disk: what was put beside the layers in comoe.json, its tensors in adapters.safetensors."""

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
PARTS = ("router", "down", "up")


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What adapters are, which layers they stand beside, and how they came about."""

    config: ComoeConfig
    layers: Mapping[str, tuple[int, int]]  # features into and out of each linear layer
    model: str = ""  # that they were trained on
    training: Mapping[str, Any] | None = None
    format: Literal["moe-compressor-comoe/1"] = "moe-compressor-comoe/1"


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Router, A and B of every layer with experts, by name: float32, on the CPU."""
    return {
        f"{name}.{part}": getattr(layer, part).detach().cpu().contiguous()
        for name, layer in comoe_layers(model).items()
        for part in PARTS
    }


def adapter_facts(model: nn.Module, label: str = "", training: Mapping[str, Any] | None = None) -> AdapterFacts:
    """What there is to say of an injected model; raises `CompressionError` where it has no experts."""
    found = comoe_layers(model)
    if not found:
        raise CompressionError("the model has no LoRA experts to save; put some in with inject")
    layers = {name: (layer.base.in_features, layer.base.out_features) for name, layer in found.items()}
    return AdapterFacts(next(iter(found.values())).config, layers, label, training)


def write_adapters(model: nn.Module, facts: AdapterFacts, folder: Path) -> None:
    """Both files into a folder that exists."""
    content = json.dumps(plain_json(facts), indent=2)
    (folder / FACTS).write_text(content + "\n", encoding="utf-8")
    save_file(adapter_tensors(model), folder / TENSORS, metadata={"format": "pt"})


def save_adapters(model: nn.Module, folder: str | Path, overwrite: bool = False) -> None:
    """Write the adapters of an injected model into a new folder, all of it or, when anything fails, nothing."""
    facts = adapter_facts(model)
    with whole_folder(Path(folder), (FACTS, TENSORS), overwrite) as made:
        write_adapters(model, facts, made)


def read_facts(folder: Path) -> AdapterFacts:
    """What adapters in a folder are; raises `CompressionError` where there are none."""
    if not (folder / FACTS).is_file() or not (folder / TENSORS).is_file():
        raise CompressionError(
            f"{folder} holds no {FACTS} with {TENSORS}; name a folder that `moe-compress comoe train` has written"
        )
    return read_as(AdapterFacts, read_json(folder / FACTS, RESTORE, RESTORE), str(folder / FACTS))


def load_adapters(model: Model, folder: str | Path) -> Model:
    """Put the experts of a folder into a model, which is changed in place and returned.

    Raises `CompressionError` where the model has not the layers that they were trained beside, or a file is damaged;
    the model is then as it was.
    """
    place = Path(folder)
    facts = read_facts(place)
    refuse_injected(model)
    _check_base(model, facts, place)
    _check_tensors(place / TENSORS, facts)
    tensors = load_file(place / TENSORS)
    if odd := next((name for name, value in tensors.items() if not bool(value.isfinite().all())), None):
        raise CompressionError(f"tensor {odd!r} of {place / TENSORS} holds NaN or infinity; train the adapters again")
    inject_config(model, facts.config)
    put_tensors(model, tensors)
    return model


def put_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The tensors of `adapter_tensors` back into the experts of an injected model."""
    for name, layer in comoe_layers(model).items():
        for part in PARTS:
            getattr(layer, part).data.copy_(tensors[f"{name}.{part}"])


def _check_base(model: nn.Module, facts: AdapterFacts, folder: Path) -> None:
    layers = targeted(model, facts.config.targets).items()
    linear = {name: (layer.in_features, layer.out_features) for name, layer in layers}
    of = f" ({facts.model})" if facts.model else ""
    for name in dict.fromkeys((*facts.layers, *linear)):
        wanted, found = facts.layers.get(name), linear.get(name)
        if wanted != found:
            here = "lacks it" if found is None else f"has one of {found[0]} by {found[1]} features"
            there = f"of {wanted[0]} by {wanted[1]} features" if wanted else "without one"
            raise CompressionError(
                f"the adapters in {folder} were trained on another model{of}: there layer {name!r} is {there}, this "
                f"model {here}; name the model that they were trained on"
            )


def _check_tensors(path: Path, facts: AdapterFacts) -> None:
    config, header = facts.config, read_header(path)
    wanted = dict[str, tuple[int, ...]]()
    for name, (into, out) in facts.layers.items():
        wanted[f"{name}.router"] = (config.experts, into)
        wanted[f"{name}.down"] = (config.experts, config.rank, into)
        wanted[f"{name}.up"] = (config.experts, out, config.rank)
    found = {name: tuple(info.shape) for name, info in header.items() if info.dtype == "F32"}
    if odd := next((name for name in sorted({*wanted, *header}) if wanted.get(name) != found.get(name)), None):
        raise CompressionError(f"tensor {odd!r} of {path} does not fit the {FACTS} beside it; {RESTORE}")
