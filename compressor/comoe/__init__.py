"""CoMoE: LoRA experts with a top-k router beside linear layers, and a contrastive loss that keeps them distinct."""

from compressor.comoe.adapters import load_adapters, save_adapters
from compressor.comoe.layer import LoraExperts, comoe_layers, inject
from compressor.comoe.options import ComoeConfig

__all__ = ["ComoeConfig", "LoraExperts", "comoe_layers", "inject", "load_adapters", "save_adapters"]
