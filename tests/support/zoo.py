"""Tiny models of every transformers family that carries the uniform experts interface, built in code.

Test support: no download, no disk, float32 on the CPU; see `zoo_configs.py` for the configurations.
"""

import atexit
import copy
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tests.support.zoo_configs import FAMILIES as FAMILIES
from tests.support.zoo_configs import FIRST_TOKEN
from tests.support.zoo_configs import VARIANTS as VARIANTS
from tests.support.zoo_configs import Family as Family

STD = 0.15  # of a matrix; hidden 32, so a normed input gives outputs of about 0.85
EMBEDDING_STD = 0.5  # above the biases, so that the residual stream stays the token's own
ROUTER_STD = 0.5  # router logits spread by about 2.8, so that tokens choose differently
NOISE = 0.1  # added to vectors (norms, biases, scales), so that swapping two entries shows in the logits
ROUTERS = (".gate.", ".router.")
REPRESENTATIVE = {  # one of every layout
    "mixtral", "deepseek_v3", "gpt_oss", "nemotron_h",
}  # fmt: skip
LOOPED = {"inkling2_loop"} & FAMILIES.keys()  # families whose layers run several times in a forward
KEPT = ("bias", "scale", "norm", "A_log")  # parameters, of 2 dimensions too, that stay near what the code chose


full = partial(pytest.param, marks=pytest.mark.full)  # of which `make test` leaves out a case


def few(cases: Iterable[Any], count: int) -> list[Any]:
    """Parameters of a test of many cases: `make test` runs it on the first `count`."""
    parameters = []
    for number, case in enumerate(cases):
        values = case.values if hasattr(case, "marks") else case if isinstance(case, tuple) else (case,)
        parameters.append(case if number < count else full(*values))
    return parameters


def sweep(names: Iterable[str] = (*FAMILIES, *VARIANTS), but: Collection[str] = ()) -> list[Any]:
    """Parameters of a test of many families: `make test` runs it on the representative ones among them."""
    return [name if name in REPRESENTATIVE else full(name) for name in names if name not in but]


def family(name: str) -> Family:
    """The entry called `name`, family or variant."""
    return FAMILIES[name] if name in FAMILIES else VARIANTS[name]


def configure(name: str, **overrides: Any) -> PreTrainedConfig:
    """The tiny config; an override may be a dotted path: `**{"text_config.num_experts": 4}`."""
    entry = family(name)
    config: PreTrainedConfig = getattr(transformers, entry.config_class)(**_merged(entry.config, overrides))
    return config


def _merged(config: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    merged = {key: _merged(value, {}) if isinstance(value, dict) else value for key, value in config.items()}
    for path, value in overrides.items():
        head, _, rest = path.partition(".")
        merged[head] = _merged(merged.get(head, {}), {rest: value}) if rest else value
    return merged


def set_count(config: PreTrainedConfig, count_field: str, count: int) -> None:
    """Set the number of experts through its dotted path, in place, as surgery does."""
    *parents, field = count_field.split(".")
    target: Any = config
    for parent in parents:
        target = getattr(target, parent)
    setattr(target, field, count)


def _instantiate(entry: Family, config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = getattr(transformers, entry.model_class)(config)
    model.train(False)
    return model


def skeleton(name: str) -> PreTrainedModel:
    """The model on the meta device."""
    with torch.device("meta"):
        return _instantiate(family(name), configure(name))


def build(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 model in eval mode whose routing differs between tokens and whose biases are not zero."""
    key = repr((name, seed, overrides))
    if key not in _BUILT:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _instantiate(family(name), configure(name, **overrides))
        randomise(model, torch.Generator().manual_seed(seed))
        _BUILT[key] = model
    return copy.deepcopy(_BUILT[key])


_BUILT: dict[str, PreTrainedModel] = {}  # once a process; tests get copies


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every weight anew, in place; the draw depends on the generator and on the shapes only."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        last_two = name.split(".")[-2:]
        if parameter.dim() < 2 or any(word in part for part in last_two for word in KEPT):
            parameter.add_(NOISE * noise)
        elif any(word in name for word in ROUTERS):  # centred rows: a mean shared by all tokens favours no expert
            parameter.copy_(ROUTER_STD * (noise - noise.mean(dim=-1, keepdim=True)))
        else:
            parameter.copy_((EMBEDDING_STD if "embed" in name else STD) * noise)
    for name, buffer in model.named_buffers():
        if "tid2eid" in name:  # deepseek_v4: the experts of each token id, as values
            count = int(model.config.n_routed_experts)  # type: ignore[union-attr,arg-type]
            draws = torch.rand(buffer.shape[0], count, generator=generator)
            buffer.copy_(draws.argsort(dim=-1)[:, : buffer.shape[1]])
        elif "bias" in name:
            buffer.copy_(NOISE * torch.randn(buffer.shape, generator=generator))
            if name.endswith("balancing_biases"):  # zaya: from_pretrained resets the last entry to -1
                buffer.sub_(1)[-1] = -1
        elif name.endswith("layer_scalar"):
            buffer.add_(NOISE * torch.randn(buffer.shape, generator=generator))


def save(name: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Build and write with `save_pretrained`; returns the model."""
    model = build(name, seed)
    save_once(folder, (name, seed), model.save_pretrained)
    return model


def save_once(folder: Path, key: object, write: Callable[[Path], Any]) -> None:
    """Fill a folder with what `write` writes: the first time in this process; later it is copied."""
    first = _models() / hashlib.sha256(repr(key).encode()).hexdigest()
    if not first.exists():
        write(first)
    shutil.copytree(first, folder, dirs_exist_ok=True)


@cache
def _models() -> Path:
    folder = tempfile.mkdtemp(prefix="moe-compressor-models-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def reload(name: str, folder: Path) -> PreTrainedModel:
    """Load a saved model through the Auto class of its family."""
    model: PreTrainedModel = getattr(transformers, family(name).auto_class).from_pretrained(folder)
    model.train(False)
    return model


def experts(model: nn.Module) -> dict[str, nn.Module]:
    """The experts modules of the decoder by full name, in the model's own order."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "_apply_gate")}


def tokens(model: PreTrainedModel, batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    """Random input ids [batch, length], never a special one."""
    text = model.config.get_text_config()
    vocabulary = getattr(text, "unpadded_vocab_size", None) or text.vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TOKEN, vocabulary, (batch, length), generator=generator)


def logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Logits of a plain forward; diffusion_gemma would draw a canvas, so it gets the prompt's start."""
    inputs = {"input_ids": input_ids}
    canvas = getattr(model.config, "canvas_length", None)
    if canvas is not None:
        inputs["decoder_input_ids"] = input_ids[:, :canvas]
    with torch.no_grad():
        output: Tensor = model(**inputs).logits
    return output
