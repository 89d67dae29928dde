"""A multi-token-prediction head as a stock model of one decoder layer, which all code for models
works on.

That model is the architecture's own with a single layer, the head's: its embedding outputs the
projected pair, its final norm is the head's, and its language-model head is the head's own or the
trunk's.

Two layouts of stored names are known. DeepSeek-V3's, shared by GLM-4-MoE and others: a decoder
layer numbered past the last, with `enorm`, `hnorm`, `eh_proj` and `shared_head` (or
`final_layernorm`) beside its own tensors. Qwen3-Next's, shared by Qwen3.5 and Mellum:
`mtp.layers.N`, with `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `fc` and `norm` beside the
layers. Both project the normed embedding of the next token, followed by the normed last hidden
state.

With h_i the trunk's last hidden state after its final norm and e the embedding, the head's decoder
layer gets x_i = W [norm_e(e(t_{i+1})); norm_h(h_i)], and predicts t_{i+2} (DeepSeek-V3,
arXiv:2412.19437, equation 21, whose h_i servers and Qwen take after the final norm). A further head
gets the normed output of the one before it and e(t_{i+2}). The x_i of all text are the rows of one
table, on disk past a budget; the text that runs through the head is the numbers of these rows,
which its embedding looks up there."""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError, reason_of
from compressor.frozen import frozen
from compressor.model.architecture import build_meta, decoder_layers, head_of, with_fields
from compressor.model.moe_layer import MoeLayer, layer_number
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import LayerVisitor, Pass, allocate
from compressor.model.verification import verify_plain, verify_quantized

logger = logging.getLogger(__name__)

HEAD_FIELDS = "mtp_per_layer_config"  # of a config, since transformers 5.23
HEADS = "heads"  # the key of known heads in an opened model's `found`
SCALED = "quantization_config"
# the number of dense layers before MoE layers
FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
PARTS = {  # parts of a head beside its decoder layer, by their names there
    "enorm.weight": "embedding_norm",
    "pre_fc_norm_embedding.weight": "embedding_norm",
    "hnorm.weight": "hidden_norm",
    "pre_fc_norm_hidden.weight": "hidden_norm",
    "eh_proj.weight": "projection",
    "fc.weight": "projection",
    "shared_head.norm.weight": "norm",
    "final_layernorm.weight": "norm",
    "norm.weight": "norm",
    "shared_head.head.weight": "output",
    "embed_tokens.weight": "embedding",
}
NEEDED = ("embedding_norm", "hidden_norm", "projection", "norm")
ROOT = "mtp."
ONE_EXPERT = re.compile(r"\bexperts\.(\d+)\.")
OWN_LAYER = re.compile(r"layers\.(\d+)\.")
LOGITS = 2**25  # logits computed at once: 128 MiB in float32


@frozen
class HeadNames:
    """The stored tensors of a head: in its decoder layer by the name after `prefix`, and beside it
    by part."""

    prefix: str  # "model.layers.61." or "mtp.layers.0."
    number: int  # of its decoder layer, counted on from the model's last one
    block: tuple[str, ...]
    parts: dict[str, str]  # stored names by part

    @property
    def decoder_layer(self) -> str:
        """The head's name as a decoder layer."""
        return self.prefix.removesuffix(".")

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of all its tensors."""
        return (*(self.prefix + name for name in self.block), *self.parts.values())


@dataclass(frozen=True, eq=False)
class Head:
    """A head: its stored tensors, and the model of one decoder layer that it forms."""

    names: HeadNames
    model: OpenModel
    norm: str  # the final norm's module
    embedding: str  # the stored embedding of the next token
    checkpoint: Checkpoint  # the model's, with the stored names

    @property
    def layer(self) -> MoeLayer:
        """The MoE layer within `model`."""
        return self.model.architecture.layers[0]

    @property
    def named(self) -> MoeLayer:
        """The MoE layer as plans name it: by the stored name of its experts, and numbered past the
        trunk's."""
        name = self.names.prefix + self.layer.name.removeprefix(f"{self.layer.decoder_layer}.")
        return replace(
            self.layer, name=name, decoder_layer=self.names.decoder_layer, index=self.names.number
        )

    def stored_name(self, name: str) -> str:
        """Return the name in the output of a tensor of `model`'s decoder layer."""
        return self.names.prefix + name.removeprefix(
            stored_prefix(self.model, self.layer.decoder_layer)
        )


def find_heads(model: OpenModel) -> tuple[Head, ...]:
    """Return the heads of a model in the order in which they predict.

    Raises `CompressionError` if the tensors of a head are not understood.
    """
    if HEADS in model.cached:
        return model.cached[HEADS]  # type: ignore[no-any-return]
    stored = model.checkpoint.tensors
    heads = []
    for names in names_of(model):
        infos = [stored[names.prefix + name] for name in names.block]
        # other tools may have cut the trunk alone
        numbers = {match[1] for match in map(ONE_EXPERT.search, names.block) if match}
        fused = [info for info in infos if "experts." in info.name and len(info.shape) == 3]
        experts = model.architecture.experts
        if numbers or fused:
            experts = len(numbers) or fused[0].shape[0]
        quantized = model.layout.quantized and not all(info.is_plain for info in infos)
        # a head is built like the last layer of the trunk whose tensors it has
        kinds = dict[tuple[tuple[str, torch.Size], ...], str]()
        for layer in reversed(model.architecture.layers):
            shapes = _shapes(model.partial.model.get_submodule(layer.decoder_layer))
            kinds.setdefault(tuple(shapes.items()), layer.decoder_layer)
        reasons = []
        for decoder_layer in kinds.values():
            try:
                heads.append(_built(model, names, decoder_layer, experts, quantized))
                break
            except CompressionError as error:
                reasons.append(str(error))
        else:
            raise CompressionError(f"{names.prefix}* is not understood: {reasons[0]}")
    model.cached[HEADS] = tuple(heads)
    return tuple(heads)


def names_of(model: OpenModel) -> tuple[HeadNames, ...]:
    """Return the names of the heads among the tensors that the stock model does not load.

    Raises `CompressionError` naming a tensor that none of the known layouts has, or a part that is
    missing."""
    left_out = model.layout.left_out  # sorted
    layer_names = model.architecture.decoder_layers
    if not left_out:
        return ()

    def under(prefix: str) -> list[str]:
        return [name.removeprefix(prefix) for name in left_out if name.startswith(prefix)]

    last = layer_names[-1]
    container = stored_prefix(model, last).removesuffix(f"{layer_number(last)}.")
    prefixes = {}  # the prefix of a head's parts by that of its decoder layer
    number = len(layer_names)
    while under(f"{container}{number}."):
        prefixes[f"{container}{number}."] = f"{container}{number}."
        number += 1
    for name in under(ROOT) if not prefixes else ():
        match = OWN_LAYER.match(name)
        if match:
            prefixes[ROOT + match[0]] = ROOT  # all heads share their parts
        elif name not in PARTS:
            raise CompressionError(f"no known layout of a head has the tensor {ROOT + name!r}")
    heads = []
    for number, (prefix, parts_prefix) in enumerate(prefixes.items(), start=len(layer_names)):
        block = tuple(name for name in under(prefix) if name not in PARTS)
        parts = {PARTS[name]: parts_prefix + name for name in under(parts_prefix) if name in PARTS}
        missing = [part for part in NEEDED if part not in parts]
        if missing:
            raise CompressionError(
                f"{prefix}* has no tensor for its {missing[0].replace('_', ' ')}"
            )
        heads.append(HeadNames(prefix, number, block, parts))
    return tuple(heads)


def known_heads(model: OpenModel) -> tuple[Head, ...]:
    """Return the heads of a model; none, with a warning, if their tensors are not understood."""
    try:
        return find_heads(model)
    except CompressionError as error:
        logger.warning("a multi-token-prediction head is left out: %s", reason_of(error))
        return ()


def fitting_heads(model: OpenModel, experts: int, cut: bool = False) -> tuple[Head, ...]:
    """Return the heads with this number of experts, or more if a plan will `cut` them; no head if
    one does not fit.

    Servers have one number of experts for the trunk and its heads, and so have stock configs but
    for `HEAD_FIELDS`: heads that it describes fit unless they are to be cut.
    """
    heads = known_heads(model)
    for number, head in enumerate(heads):
        stored = head.layer.experts
        if stored == declared_experts(model, number) and not cut:
            continue
        if stored < experts or (stored > experts and not cut):
            hint = ""
            if stored > experts:
                hint = f"; with --experts {experts} and --mtp keep it is cut to that"
            logger.warning(
                "the multi-token-prediction head %s is left out: it has %d experts, and the other "
                "layers %d%s",
                head.names.decoder_layer,
                stored,
                experts,
                hint,
            )
            return ()
    if not cut and len({head.layer.experts for head in heads}) > 1:
        logger.warning("multi-token-prediction heads of unlike numbers of experts are left out")
        return ()
    return heads


def head_fields(config: Any, place: Sequence[str], number: int) -> dict[str, Any]:
    """Return the fields that a config gives a head of its own, in the node at `place`."""
    of_heads = getattr(reduce(getattr, place, config), HEAD_FIELDS, None) or {}
    return dict(of_heads.get(number) or of_heads.get(str(number)) or {})


def declared_experts(model: OpenModel, number: int) -> int | None:
    """Return how many experts the config says that a head has, unless as many as the trunk."""
    *place, count = model.architecture.count_field.split(".")
    return head_fields(model.config, place, number).get(count)


def kept_heads(model: OpenModel, modules: Iterable[str]) -> tuple[Head, ...]:
    """Return the heads whose experts modules a plan names; it must name all or none."""
    outside = set(modules) - {layer.name for layer in model.architecture.layers}
    heads = find_heads(model) if outside and model.layout.left_out else ()
    known = {head.named.name for head in heads}
    absent = sorted(known - outside)
    if len(absent) == len(known):
        return ()
    if absent:
        raise CompressionError(
            f"the plan has no entry for {absent[0]}; keep all multi-token-prediction heads or none"
        )
    return heads


def written_heads(folder: Path) -> tuple[str, ...]:
    """Return the tensors of all heads of a checkpoint on disk.

    Raises `CompressionError` where they are not understood, or have another number of experts than
    the trunk."""
    model = open_model(locate(str(folder)))
    names = list[str]()
    for number, head in enumerate(find_heads(model)):
        stored = head.layer.experts
        experts = declared_experts(model, number) or model.architecture.experts
        if stored != experts:
            raise CompressionError(
                f"{head.names.decoder_layer} has {stored} experts and the other layers {experts}, "
                "which servers build with one number; compress it with --experts "
                f"{min(stored, experts)} or --mtp drop"
            )
        names += head.names.stored
    return tuple(names)


def stored_prefix(model: OpenModel, decoder_layer: str) -> str:
    """Return the prefix of the names of a decoder layer's stored tensors, up to and with its
    number."""
    number = f".{layer_number(decoder_layer)}."
    starts = set()
    for name, role in model.layout.roles.items():
        if role.decoder_layer == decoder_layer:
            before, found, _ = name.partition(number)
            starts.add(before + found)
    if len(starts) != 1 or not min(starts).endswith(number):
        raise CompressionError(f"the stored tensors of {decoder_layer} have no prefix in common")
    return starts.pop()


def _built(model: OpenModel, names: HeadNames, like: str, experts: int, quantized: bool) -> Head:
    """Return the head of these names, a model whose only decoder layer is built like `like` with
    `experts` experts."""
    sized = with_fields(model.config, {model.architecture.count_field: experts})
    config = _one_layer(sized, len(model.architecture.decoder_layers), like)
    raw = dict(model.checkpoint.raw_config)
    if not quantized:
        raw.pop(SCALED, None)
        for node in (config, config.get_text_config()):
            vars(node).pop(SCALED, None)
    stock = build_meta(config)
    kind = type(stock).__name__
    layer_names = decoder_layers(stock)
    embedding = stock.get_input_embeddings()
    trunk = model.partial.model if experts == model.architecture.experts else build_meta(sized)
    shapes = _shapes(stock.get_submodule(layer_names[0]))
    if len(layer_names) != 1 or shapes != _shapes(trunk.get_submodule(like)):
        raise CompressionError(f"{kind} cannot be built with {like} alone")
    # tensors outside the decoder layer are the trunk's, by their stored names, unless the head has
    # its own
    parts = names.parts
    stored = {target: name for name, target in model.partial.plain_keys.targets.items()}
    modules = {module: f"{name}.weight" for name, module in stock.named_modules()}
    above = layer_names[0].rpartition(".")[0].rpartition(".")[0]
    norms = []  # beside the list of decoder layers, with one vector alone
    for child in stock.get_submodule(above).children():
        if {key: value.dim() for key, value in child.named_parameters()} == {"weight": 1}:
            norms.append(modules[child])
    embedded = modules[embedding]
    head = modules.get(head_of(stock))
    is_plain = type(embedding) is nn.Embedding and embedded in stored
    if head is None or not is_plain or len(norms) != 1 or norms[0] not in stored:
        raise CompressionError(
            f"{kind} has not one embedding, one final norm and one language-model head to share"
        )
    norm = norms[0]
    view = {name: name for name, role in model.layout.roles.items() if role.decoder_layer == ""}
    view[stored[norm]] = parts["norm"]
    view[stored.get(head, head)] = parts.get("output", stored.get(head, stored[embedded]))
    first = stored_prefix(model, like).removesuffix(f"{layer_number(like)}.") + "0."
    view |= {first + name: names.prefix + name for name in names.block}

    tensors = {
        name: replace(model.checkpoint.tensors[stored_name], name=name)
        for name, stored_name in view.items()
    }
    checkpoint = Checkpoint(model.checkpoint.folder, tensors)
    checkpoint.raw_config = raw
    checkpoint.quantization = model.checkpoint.quantization if quantized else {}
    if not quantized:
        verify_plain(checkpoint, stock)
    opened = OpenModel.of(
        model.source, checkpoint, config, model.partial.dtype, model.partial.device
    )
    if quantized:
        verify_quantized(opened)
    layers = opened.architecture.layers
    if len(layers) != 1 or layers[0].tables or layers[0].experts != experts:
        raise CompressionError(
            "its decoder layer does not hold one block of experts like the others'"
        )
    width = int(model.partial.model.get_input_embeddings().weight.shape[1])
    wanted = {"projection": (width, 2 * width), "embedding_norm": (width,), "hidden_norm": (width,)}
    for part, shape in wanted.items():
        info = model.checkpoint.tensors[parts[part]]
        if info.shape != shape or not info.is_plain:
            raise CompressionError(
                f"tensor {info.name!r} is {info.dtype} {list(info.shape)}, not plain {list(shape)}"
            )
    norm = norm.removesuffix(".weight")
    return Head(names, opened, norm, parts.get("embedding", stored[embedded]), model.checkpoint)


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in layer.state_dict().items()}


def _one_layer(config: Any, count: int, like: str) -> Any:
    """Return the config of a model of `count` layers with only one, built like `like`, and an
    untied output head."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    index = layer_number(like)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count and ("layer" in name or "type" in name):
            setattr(text, name, [value[index]])
    for name in FIRST_DENSE:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, 0)
    if hasattr(text, "decoder_sparse_step"):
        text.decoder_sparse_step = 1
        text.mlp_only_layers = []
    text.num_hidden_layers = 1
    config.tie_word_embeddings = text.tie_word_embeddings = False
    return config


class _Rows(nn.Module):
    """An embedding of row numbers: the rows of a table [T, H]."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = {"rows": table}  # in a dict, so that it is no tensor of the model

    def forward(self, numbers: Tensor) -> Tensor:
        return self.table["rows"][numbers]


@dataclass
class MtpStage(LayerVisitor):
    """A model or one of its heads that text runs through; each head gets the last hidden states of
    the stage before it.

    The batches [B, L] of a head are row numbers in the place of token ids, and `table` [T, H] is
    what they stand for. The argmax tokens of `evaluated` batches are kept. All batches of the pass
    must be finished."""

    model: OpenModel
    batches: tuple[Tensor, ...]
    evaluated: frozenset[int]
    head: Head | None = None
    tokens: tuple[Tensor, ...] = ()  # [B, L] that a head's hidden states are paired with
    table: Tensor = field(default_factory=lambda: torch.zeros(0, 1))
    following: "MtpStage | None" = None
    choices: dict[int, Tensor] = field(default_factory=dict)  # [B, L] by batch

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """While the block runs, look up rows in the table, and take hidden states in place of
        computing all logits."""
        model = self.model.partial.model
        following = self.following
        embedded = model.get_input_embeddings()
        head = head_of(model)
        assert head is not None  # or there were no head to share it with
        logits = head.forward
        at_once = max(1, LOGITS // int(head.weight.shape[0]))  # type: ignore[index]
        projection = cache(_projection)  # loaded with the first batch

        @torch.no_grad()
        def take(hidden: Tensor) -> Tensor:
            batch = self.at.batch
            if batch >= len(self.batches):  # text that runs along and goes to no head
                return hidden[..., :0]
            if following is not None and following.head is not None:
                pairs = projection(following.head)(following.tokens[batch], hidden[:, :-1])
                following.table[following.batches[batch].to(following.table.device)] = pairs
            if batch in self.evaluated:
                parts = hidden.flatten(0, 1).split(at_once)
                chosen = torch.cat([logits(part).argmax(-1) for part in parts])
                self.choices[batch] = chosen.view(hidden.shape[:2]).cpu()
            return hidden[..., :0]

        name = next(name for name, module in model.named_modules() if module is embedded)
        if self.head is not None:
            model.set_submodule(name, _Rows(self.table))
        head.forward = take
        try:
            yield
        finally:
            head.__dict__.pop("forward", None)
            model.set_submodule(name, embedded)


def mtp_stages(
    model: OpenModel,
    heads: Sequence[Head],
    batches: Sequence[Tensor],
    evaluated: frozenset[int] = frozenset(),
) -> list[MtpStage]:
    """Return a model and its heads, to be run in this order on token ids [B, L], each stage within
    its `hooked`."""
    stages = [MtpStage(model, tuple(batches), evaluated)]
    for ahead, head in enumerate(heads, start=1):
        tokens = tuple(batch[:, ahead:] for batch in batches)
        shortest = min(batch.shape[1] for batch in tokens) + 1
        if shortest < 3:
            raise CompressionError(
                f"a multi-token-prediction head cannot be planned on sequences of {shortest} "
                "tokens; give a larger --sequence-length, or --mtp drop"
            )
        sizes = [batch.numel() for batch in tokens]
        numbers = zip(torch.arange(sum(sizes)).split(sizes), tokens, strict=True)
        partial = head.model.partial
        width = int(partial.model.get_input_embeddings().weight.shape[1])
        table = allocate((sum(sizes), width), partial.dtype, partial.device)
        rows = tuple(row_numbers.view(batch.shape) for row_numbers, batch in numbers)
        stages.append(MtpStage(head.model, rows, evaluated, head, tokens, table))
        stages[-2].following = stages[-1]
    return stages


def _projection(head: Head) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function before a head's decoder layer: tokens [B, L] and hidden states [B, L, H]
    -> [B, L, H].

    Its norms and its matrix [H, 2H] are loaded; the embedding is read row by row.
    """
    partial = head.model.partial
    table = head.checkpoint.read_checked(head.embedding)
    weights = {}
    norms = {}
    for part in ("projection", "embedding_norm", "hidden_norm"):
        stored = head.checkpoint.read_checked(head.names.parts[part])
        weights[part] = stored.to(partial.device, partial.dtype)
        if part != "projection":
            norms[part] = copy.deepcopy(partial.model.get_submodule(head.norm))
            norms[part].weight = nn.Parameter(weights[part], requires_grad=False)

    def project(tokens: Tensor, hidden: Tensor) -> Tensor:
        looked_up = embedding(tokens.to(table.device), table).to(hidden.device, hidden.dtype)
        pairs = [norms["embedding_norm"](looked_up), norms["hidden_norm"](hidden)]
        return linear(torch.cat(pairs, dim=-1), weights["projection"])

    return project


def agreement(trunk: MtpStage, head: MtpStage) -> Tensor:
    """Return [agreed, positions]: the number of positions where head and trunk have the same
    argmax, and of all."""
    counts = torch.zeros(2, dtype=torch.long)
    for batch, chosen in head.choices.items():
        agreed = trunk.choices[batch][:, -chosen.shape[1] :] == chosen
        counts += torch.tensor([agreed.sum(), agreed.numel()])
    return counts


def acceptances(model: OpenModel, heads: Sequence[Head], batches: Sequence[Tensor]) -> list[Tensor]:
    """Return each head's `agreement` on token ids [B, L], measured in a pass of its own."""
    stages = mtp_stages(model, heads, batches, frozenset(range(len(batches))))
    for mtp_stage in stages:
        with mtp_stage.hooked():
            Pass(mtp_stage.model, mtp_stage.batches, to_end=True).run(mtp_stage)
    return [agreement(stages[0], mtp_stage) for mtp_stage in stages[1:]]
