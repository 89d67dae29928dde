"""CoMoE: LoRA experts with a top-k router beside linear layers, and a contrastive loss that keeps them distinct."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.comoe.adapters import load_adapters, save_adapters
    from compressor.comoe.layer import LoraExperts, comoe_layers, inject
    from compressor.comoe.options import ComoeConfig

_HOMES = {
    "ComoeConfig": "options",
    "LoraExperts": "layer",
    "comoe_layers": "layer",
    "inject": "layer",
    "load_adapters": "adapters",
    "save_adapters": "adapters",
}
__all__ = ["ComoeConfig", "LoraExperts", "comoe_layers", "inject", "load_adapters", "save_adapters"]


def __getattr__(name: str) -> Any:
    """The public name, loaded on first use (PEP 562): the command line reads options without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
