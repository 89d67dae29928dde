"""Cut and corrected layers on disk, between the pass that makes them and the writing of the output."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from compressor.files import replacing
from compressor.model.architecture import MoeLayer
from compressor.plans.json import layer_from_dict, layer_to_dict
from compressor.plans.layer import LayerPlan


@dataclass(frozen=True, slots=True)
class CutFiles:
    """Cut and corrected tensors of finished layers, a file each, so that an interrupted run need not repeat them."""

    folder: Path

    def _path(self, layer: MoeLayer) -> Path:
        return self.folder / f"{layer.name}.safetensors"

    def save(self, plan: LayerPlan, layer: MoeLayer, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a layer's tensors with its plan; a file is there whole or not at all."""
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        path = self._path(layer)
        with replacing(path, path.with_suffix(".new")) as fresh:
            save_file(whole, fresh, metadata={"plan": json.dumps(layer_to_dict(plan))})

    def plan(self, layer: MoeLayer) -> LayerPlan | None:
        """The plan of a finished layer; None if it is not there."""
        from safetensors import safe_open

        if not self._path(layer).is_file():
            return None
        with safe_open(self._path(layer), framework="pt") as file:
            return layer_from_dict(json.loads(file.metadata()["plan"]))

    def tensors(self, layer: MoeLayer) -> dict[str, torch.Tensor]:
        """The tensors of a finished layer; none if it is not there."""
        from safetensors.torch import load_file

        return load_file(self._path(layer)) if self._path(layer).is_file() else {}
