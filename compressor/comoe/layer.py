"""Linear layers with LoRA experts and a router beside them (CoMoE, equations 1 to 3): put in, saved
and loaded.

Letters: T tokens, E experts, K of them activated, r rank, D_in and D_out features of the linear
layer. The contrastive loss of a whole model is the mean over its layers (equations 12 and 13). On
disk, comoe.json says what adapters are and which layers they stand beside, adapters.safetensors
holds their tensors."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressor.checkpoint.reader import read_header
from compressor.comoe.contrastive import contrastive_loss
from compressor.comoe.options import ComoeConfig, TuningOptions
from compressor.errors import CompressionError
from compressor.files import whole_folder
from compressor.frozen import frozen
from compressor.options import NamedOptions, validated
from compressor.records import RESTORE, Json, read_object

Model = TypeVar("Model", bound=nn.Module)
SHORTEST = 1e-12  # length of a row of weights, all of which may be 0
FACTS = "comoe.json"
TENSORS = "adapters.safetensors"


@frozen
class LayerCall:
    """The inputs and choices of one call of a layer, for the contrastive loss and for counting."""

    inner: Tensor  # [T, E, r], A_i x of every expert
    chosen: Tensor  # [T, K], the activated ones, the most important first
    linear: Tensor | None = None  # [T, D_out], W x, for DoRA
    stretch: Tensor | None = None  # [E, D_out], for DoRA

    def counted(self, mask: Tensor) -> Tensor:
        """Return the indices of the tokens in a batch's mask [B, S]; all for a layer that sees
        other tokens."""
        if mask.numel() != len(self.inner):
            return torch.arange(len(self.inner))
        return mask.reshape(-1).cpu().nonzero().squeeze(1)


class LoraExperts(nn.Module):
    """y = W x + sum_i g_i(x) E_i(x), with E_i(x) = scaling * B_i A_i x and g renormalised over K
    experts.

    W stays as it is; the experts and the router compute in float32. B begins at 0, so y is W x
    exactly.

    With `dora`, expert i has the weights W_i = W + scaling * B_i A_i, each row made as long as
    `magnitude` says, and E_i(x) is what these answer less W x. The lengths of W_i get no gradient
    (DoRA, section 4.3)."""

    def __init__(self, base: nn.Linear, config: ComoeConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.config = config
        self.top_k = config.top_k
        self.scaling = 2.0 if config.alpha is None else config.alpha / config.rank
        self.dropout = nn.Dropout(config.dropout)
        bound = 1 / math.sqrt(base.in_features)  # as `nn.Linear` and LoRA's A begin
        router = torch.empty(config.experts, base.in_features)
        down = torch.empty(config.experts, config.rank, base.in_features)
        for drawn in (router, down):
            drawn.uniform_(-bound, bound, generator=generator)
        device = base.weight.device
        self.router = nn.Parameter(router.to(device))  # [E, D_in]
        self.down = nn.Parameter(down.to(device))  # A, [E, r, D_in]
        up = torch.zeros(config.experts, base.out_features, config.rank, device=device)
        self.up = nn.Parameter(up)  # B, [E, D_out, r]
        if config.dora:
            self.magnitude = nn.Parameter(self.lengths())  # [E, D_out]
        self.watched: list[LayerCall] | None = None  # grows with each call inside `watching`

    @property
    def weight(self) -> Tensor:
        """The linear layer's own, which the model's code may read."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """The linear layer's own."""
        return self.base.bias

    def gates(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Equation 3: all experts' weights g, [T, E], and the chosen experts, [T, K]; ties go to
        the lower number."""
        importance = (tokens @ self.router.T).softmax(-1)
        chosen = importance.argsort(dim=-1, descending=True, stable=True)[:, : self.top_k]
        weights = importance.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        return torch.zeros_like(importance).scatter(1, chosen, weights), chosen

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D_in] -> [..., D_out]."""
        straight: Tensor = self.base(hidden)
        tokens = hidden.reshape(-1, hidden.shape[-1]).to(torch.float32)
        weights, chosen = self.gates(tokens)
        inner = torch.einsum("ti,eri->ter", self.dropout(tokens), self.down)
        call = LayerCall(inner, chosen)
        up: Tensor = self.up
        if self.config.dora:
            linear = straight if self.bias is None else straight - self.bias
            linear = linear.reshape(len(tokens), -1).float()
            stretch = self.magnitude / self.lengths()
            call = LayerCall(inner, chosen, linear, stretch)
            up = up * stretch.unsqueeze(-1)
        added = torch.einsum("ter,eor->to", inner * weights.unsqueeze(-1), up) * self.scaling
        if self.config.dora:
            added = added + linear * (weights @ (stretch - 1))
        if self.watched is not None:
            self.watched.append(call)
        return straight + added.to(straight.dtype).reshape(straight.shape)

    @torch.no_grad()
    def lengths(self) -> Tensor:
        """Return the length of each row of W + scaling * B_i A_i, [E, D_out]."""
        weight = self.weight.float()
        lengths = [
            (weight + self.scaling * up @ down).norm(dim=1)
            for up, down in zip(self.up, self.down, strict=True)
        ]
        return torch.stack(lengths).clamp_min(SHORTEST)

    def outputs(self, call: LayerCall, indices: Tensor) -> Tensor:
        """Return each expert's output for some of a call's tokens, [T, E, D_out]: E_i(x), or B_i
        A_i x without DoRA."""
        outputs = torch.einsum("ter,eor->teo", call.inner[indices], self.up)
        if call.linear is None or call.stretch is None:
            return outputs
        return self.scaling * outputs * call.stretch + call.linear[indices].unsqueeze(1) * (
            call.stretch - 1
        )


def comoe_layers(model: nn.Module) -> dict[str, LoraExperts]:
    """The layers with experts beside them, by name; none of a model without."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LoraExperts)
    }


@contextmanager
def watching(layers: Mapping[str, LoraExperts]) -> Iterator[None]:
    """Keep every call of these layers in their `watched` while the block runs; use it before the
    next forward."""
    for layer in layers.values():
        layer.watched = []
    try:
        yield
    finally:
        for layer in layers.values():
            layer.watched = None


def model_contrast(
    layers: Iterable[LoraExperts],
    mask: Tensor,
    options: TuningOptions,
    generator: torch.Generator,
) -> Tensor:
    """The loss of the tokens that watched layers have just seen: the mean over layers, and over the
    tokens of each.

    `mask` [B, S] is 0 for tokens that do not count, such as padding; a layer that sees other tokens
    than the batch's (an expert's own layer) uses all of its own. In each layer at most
    `contrastive_tokens` of them are drawn (0: all count). For each token one of its activated
    experts is drawn as the anchor (Algorithm 1), or each of them is one, and a token's losses are
    added up (equation 12, whose positives are all other activated experts, as in Algorithm 1)."""
    losses = []
    for layer in layers:
        for call in layer.watched or ():
            if not len(call.inner):
                continue
            indices = call.counted(mask)
            most = options.contrastive_tokens
            if most and len(indices) > most:
                drawn = torch.randperm(len(indices), generator=generator)[:most]
                indices = indices[drawn.sort().values]
            count = len(indices)
            if options.anchors == "all":
                positions = [torch.full((count,), position) for position in range(layer.top_k)]
            else:
                positions = [torch.randint(layer.top_k, (count,), generator=generator)]
            indices = indices.to(call.chosen.device)
            chosen = call.chosen[indices]
            outputs = layer.outputs(call, indices)  # [T, E, D_out]
            by_anchor = []
            for position in positions:
                # the anchor comes first, then its positives, and inactive experts last
                anchor = chosen.gather(1, position.to(indices.device).unsqueeze(1))
                rank = torch.full_like(outputs[..., 0], 2).scatter(1, chosen, 1)
                order = rank.scatter(1, anchor, 0).argsort(dim=1, stable=True)
                ordered = outputs.gather(1, order.unsqueeze(-1).expand_as(outputs))
                positives, negatives = ordered[:, 1:].tensor_split([layer.top_k - 1], dim=1)
                loss = contrastive_loss(ordered[:, 0], positives, negatives, options.temperature)
                by_anchor.append(loss)
            losses.append(torch.stack(by_anchor).sum())
    return torch.stack(losses).mean()


def inject(model: Model, config: ComoeConfig) -> Model:
    """Put LoRA experts with a router beside every `nn.Linear` whose name ends with a target; all
    else is frozen.

    The model is changed in place and returned; it computes the same until it is trained. Raises
    `CompressionError` where a target names no layer, or the model has experts of this kind
    already."""
    if comoe_layers(model):
        raise CompressionError(
            "the model has LoRA experts already; load it anew before putting others in"
        )
    layers = targeted(model, config)
    for target in config.targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            ends = {
                name.rpartition(".")[2]
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear)
            }
            known = f"they end with {', '.join(sorted(ends))}" if ends else "it has none"
            within = f"in decoder layers {config.layers} " if config.layers else ""
            raise CompressionError(
                f"no linear layer of the model {within}has a name that ends with {target!r}; "
                f"{known}"
            )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(config.seed)
    for name, base in layers.items():
        model.set_submodule(name, LoraExperts(base, config, generator).train(base.training))
    return model


def targeted(model: nn.Module, config: ComoeConfig) -> dict[str, nn.Linear]:
    """The linear layers whose name's last parts are one of a config's targets, by name, in its
    decoder layers: those entries of the outermost list of modules."""
    endings = tuple(f".{target}" for target in config.targets)
    lists = dict[str, set[int]]()  # the prefix of what is in an outermost list
    layers = {}
    for name, module in model.named_modules():
        outer = next((prefix for prefix in lists if name.startswith(prefix)), None)
        if isinstance(module, nn.ModuleList) and outer is None:
            lists[f"{name}."] = config.decoder_layers(len(module))
        if isinstance(module, nn.Linear) and f".{name}".endswith(endings):
            number = name.removeprefix(outer or "").partition(".")[0]
            if config.layers is None or (outer is not None and int(number) in lists[outer]):
                layers[name] = module
    return layers


class AdapterFacts(NamedOptions):
    """The record beside adapters: their config, the layers they stand beside, and their
    training."""

    config: ComoeConfig
    layers: Mapping[str, tuple[int, int]]  # features into and out of each linear layer
    model: str = ""  # that they were trained on
    training: Json | None = None
    format: Literal["moe-compressor-comoe/1"] = "moe-compressor-comoe/1"


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Router, A, B and, of DoRA, magnitude of every layer with experts, by state-dict key: float32,
    on the CPU."""
    tensors = {}
    for name, layer in comoe_layers(model).items():
        for part, value in layer.named_parameters(recurse=False):
            tensors[f"{name}.{part}"] = value.detach().cpu().contiguous()
    return tensors


def write_adapters(
    model: nn.Module,
    folder: Path,
    label: str = "",
    training: Json | None = None,
) -> None:
    """Write both files into a folder that exists; raises `CompressionError` for a model without
    experts."""
    experts = comoe_layers(model)
    if not experts:
        raise CompressionError("the model has no LoRA experts to save; put some in with inject")
    layers = {
        name: (layer.base.in_features, layer.base.out_features) for name, layer in experts.items()
    }
    config = next(iter(experts.values())).config
    facts = AdapterFacts(config=config, layers=layers, model=label, training=training)
    content = json.dumps(facts.model_dump(mode="json"), indent=2) + "\n"
    (folder / FACTS).write_text(content, encoding="utf-8")
    save_file(adapter_tensors(model), folder / TENSORS, metadata={"format": "pt"})


def save_adapters(model: nn.Module, folder: str | Path, overwrite: bool = False) -> None:
    """Write the adapters of an injected model into a new folder, all of it or, when anything fails,
    nothing."""
    with whole_folder(Path(folder), (FACTS, TENSORS), overwrite) as fresh:
        write_adapters(model, fresh)


def read_facts(folder: Path) -> AdapterFacts:
    """Read the record of adapters in a folder; raises `CompressionError` where there are none."""
    if not (folder / FACTS).is_file() or not (folder / TENSORS).is_file():
        raise CompressionError(
            f"{folder} holds no {FACTS} with {TENSORS}; name a folder that `moe-compress comoe "
            "train` has written"
        )
    path = folder / FACTS
    return validated(AdapterFacts, read_object(path), str(path), f"{path} has an unknown field")


def load_adapters(model: Model, folder: str | Path) -> Model:
    """Put the experts of a folder into a model, which is changed in place and returned.

    Raises `CompressionError`, leaving the model as it was, where it lacks their layers or a file is
    damaged."""
    path = Path(folder) / TENSORS
    facts = read_facts(Path(folder))
    config = facts.config
    trained_on = f" ({facts.model})" if facts.model else ""
    present = {
        name: (layer.in_features, layer.out_features)
        for name, layer in targeted(model, config).items()
    }
    shapes = dict[str, tuple[int, ...]]()
    for name in dict.fromkeys((*facts.layers, *present)):
        sizes = facts.layers.get(name), present.get(name)
        if sizes[0] != sizes[1]:
            trained, here = (
                "{} by {} features".format(*size) if size else "missing" for size in sizes
            )
            raise CompressionError(
                f"the adapters in {folder} were trained on another model{trained_on}: there layer "
                f"{name!r} is "
                f"{trained}, in this model {here}; name the model that they were trained on"
            )
        into, out = facts.layers[name]
        shapes[f"{name}.router"] = (config.experts, into)
        shapes[f"{name}.down"] = (config.experts, config.rank, into)
        shapes[f"{name}.up"] = (config.experts, out, config.rank)
        if config.dora:
            shapes[f"{name}.magnitude"] = (config.experts, out)
    if {name: tuple(info.shape) for name, info in read_header(path).items()} != shapes:
        raise CompressionError(f"{path} does not fit the {FACTS} beside it; {RESTORE}")
    # strict would miss the model's own tensors
    inject(model, config).load_state_dict(load_file(path), strict=False)
    return model
