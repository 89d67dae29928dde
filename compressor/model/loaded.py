"""A model in memory as the source of a run; importing this does not load torch, as recipes import
it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that stock transformers has built or loaded, with its tokenizer or processor; neither
    is changed."""

    model: Any
    tokenizer: Any

    def __post_init__(self) -> None:
        kinds = [kind.__name__ for kind in type(self.model).__mro__]
        if "PreTrainedModel" not in kinds:
            raise CompressionError(
                f"a {kinds[0]} is no model of transformers; give a folder, a Hub id or a "
                "PreTrainedModel, and merge adapters into it before (merge_and_unload)"
            )
        if self.tokenizer is None:
            raise CompressionError("a model in memory has no tokenizer; pass tokenizer=")
        unfit = {
            "has adapters": self.model._hf_peft_config_loaded,
            "is quantised": hasattr(self.model, "hf_quantizer"),
            "is not whole in memory": any(value.is_meta for value in self.model.parameters()),
        }
        for what, is_so in unfit.items():
            if is_so:
                raise CompressionError(f"the model {what}; give its folder or Hub id instead")

    @property
    def name(self) -> str:
        """The last part of the path or Hub id that it was loaded from, or its class."""
        loaded_from = Path(str(getattr(self.model.config, "_name_or_path", "") or "")).name
        return re.sub(r"[^\w.-]", "_", loaded_from).lstrip(".") or type(self.model).__name__


def given(model: Any, tokenizer: Any = None) -> str | LoadedModel:
    """Return the model that a caller gives: a folder, a Hub id, or a model in memory."""
    if isinstance(model, str | Path):
        return str(model)
    return model if isinstance(model, LoadedModel) else LoadedModel(model, tokenizer)
