"""CoMoE: LoRA experts with a top-k router beside linear layers, and a contrastive loss that keeps them distinct."""

from compressor.recovery.comoe.adapters import load_adapters, save_adapters
from compressor.recovery.comoe.config import ComoeConfig
from compressor.recovery.comoe.injection import inject
from compressor.recovery.comoe.layer import LoraExperts, comoe_layers

__all__ = ["ComoeConfig", "LoraExperts", "comoe_layers", "inject", "load_adapters", "save_adapters"]
