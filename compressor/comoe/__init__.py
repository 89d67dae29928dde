"""CoMoE: LoRA experts with a top-k router beside linear layers, and a contrastive loss that keeps them distinct."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.comoe.layer import (
        LoraExperts,
        comoe_layers,
        inject,
        load_adapters,
        save_adapters,
    )
    from compressor.comoe.options import ComoeConfig

__all__ = [
    "ComoeConfig",
    "LoraExperts",
    "comoe_layers",
    "inject",
    "load_adapters",
    "save_adapters",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562), so that the command line reads options without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'options' if name == 'ComoeConfig' else 'layer'}"), name)
