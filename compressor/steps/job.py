"""From an opened model and a plan to the job of writing it.

The layers of multi-token-prediction heads are cut like the others; what stands beside them is
copied."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial as bind
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from compressor.checkpoint.reader import (
    DTYPE_NAMES,
    MODELOPT,
    TORCH_DTYPES,
    Size,
    modelopt_file,
    refuse_links,
)
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.files import TEMPLATES
from compressor.formatting import human_bytes
from compressor.frozen import frozen
from compressor.model.architecture import build_meta, load_config
from compressor.model.inspection import stored_with
from compressor.model.layout import Role
from compressor.model.loading import PartialModel
from compressor.model.mtp import Head, find_heads, fitting_heads, kept_heads
from compressor.model.opened import NARROWED, OpenModel, open_model, pick_dtype, shared_experts
from compressor.model.remote_code import json_bytes, naming_code, without_code
from compressor.model.verification import check_carried, verify_checkpoint
from compressor.recipe.plan import ExpertPlan, LayerPlan, check_layers
from compressor.records import Json, read_object
from compressor.steps.configuration import (
    all_renames,
    expert_renames,
    output_config,
    renumbered_quantization,
)
from compressor.steps.cutting import Conversion, CutFiles, cut_or_kept, through_model
from compressor.steps.tensors import (
    Named,
    OutputJob,
    OutputTensor,
    expert_slots,
    plan_outputs,
    stored_decoder_layer,
    tensor_bytes_view,
    widest,
)

Change = Callable[[str, Tensor], Tensor]  # a stored tensor by its name -> as it is to be stored

logger = logging.getLogger(__name__)

# what loaders read, and licences: other files speak of how another model was made
CARRIED = re.compile(
    r"((generation|(audio_)?tokenizer|hf_quant|feature_extractor"
    r"|(\w+_)?(pre)?processor)_config|configuration)\.json"
    r"|(tokenizer|tekken|vocab|merges|encoder|added_tokens|special_tokens_map"
    r"|normalizer)([.-].+)?\.(json|txt)"
    r"|vocab|.+\.(jinja|tiktoken|spm|bpe|codes|vocab)|.+\.model(\.v\d\w*)?|dict\.txt"
    r"|chat_template\.json"
    r"|(system_prompt|licen[cs]e|notice|copying)([._-](?!(md|py)$).*)?",
    re.IGNORECASE,
)


@frozen
class OutputSize:
    """Size of a checkpoint that a step stores in a way of its own, and bytes that wait in the work
    folder meanwhile."""

    size: Size
    waiting: int = 0


def carried_files(folder: Path) -> dict[str, bytes | Path]:
    """Files that travel with the weights: generation config, tokenizer, chat templates, processors,
    licence.

    None is hidden, and no config names code, which stays behind. Raises `CompressionError` naming a
    file that is a link out of the folder."""
    refuse_links(folder)
    files: dict[str, bytes | Path] = {
        path.name: path
        for path in sorted(folder.glob("[!.]*"))
        if path.is_file() and CARRIED.fullmatch(path.name)
    }
    for path in naming_code(folder):
        if path.name in files:
            files[path.name] = json_bytes(without_code(read_object(path)))
    for path in sorted((folder / TEMPLATES).glob("[!.]*")):
        if path.is_file():
            files[f"{TEMPLATES}/{path.name}"] = path
    return files


def files_with(model: OpenModel, config: Json) -> dict[str, bytes | Path]:
    """Return the files beside the weights: those of the source, and this config."""
    return {**carried_files(model.source.folder), "config.json": json_bytes(config)}


def stored_partial(model: OpenModel) -> PartialModel:
    """Return the model in the checkpoint's own dtype on the CPU, whatever dtype and device it is
    opened with."""
    return model.partial.computing_in(stored_dtype(model), torch.device("cpu"))


def stored_dtype(model: OpenModel) -> torch.dtype:
    """Return the checkpoint's own dtype; the widest of its experts' where it is not quantised."""
    dtype = pick_dtype("auto", model.config, model.checkpoint)
    for name, role in {} if model.layout.quantized else model.layout.roles.items():
        if role.kind in ("expert", "fused") and not role.is_router:
            dtype = torch.promote_types(dtype, TORCH_DTYPES[model.checkpoint.tensors[name].dtype])
    return NARROWED.get(dtype, dtype)


def output_size(
    model: OpenModel, experts: int, changed: bool = False, through: bool = False
) -> Size:
    """Return the parameters and bytes of the output when every MoE layer keeps `experts`.

    They stay as they are stored, unless they are `changed`: merged, corrected or trained; or all
    tensors are made `through` the model."""
    changed = through or (changed and model.layout.quantized)
    if model.stored_parts and not changed:
        return Size.of(model.stored_parts.cut(model, even_plan(model, experts)))
    if not model.is_split and not changed:
        return stored_with(model.checkpoint.tensors, model.layout, experts)
    conversion = conversion_of(model, stored_partial(model), experts)
    return Size.of(conversion.outputs(("", *model.architecture.decoder_layers)))


def even_plan(model: OpenModel, experts: int) -> ExpertPlan:
    """Return a plan that keeps up to this number of experts of each layer, equally many of each
    routing group."""
    layers = list[LayerPlan]()
    for layer in model.architecture.layers:
        kept = {slot * layer.experts // experts for slot in range(experts)}
        layers.append(LayerPlan.keep(layer, [*kept]))
    return ExpertPlan.of(layers)


def active_parameters(model: OpenModel, experts: int, parameters: int) -> int | None:
    """Return those of all `parameters` that a token uses, of the model with `experts` in each
    layer: all but those of experts that it isn't routed to.

    None where stored elements are not parameters of one layer's experts."""
    layers = model.architecture.layers
    towers = {layer.decoder_layer.rstrip("0123456789") for layer in layers}
    if model.layout.quantized or len(towers) > 1 or shared_experts(model):
        return None
    small = build_meta(model.architecture.with_experts(experts))
    for layer in layers:
        size = sum(value.numel() for value in small.get_submodule(layer.name).parameters())
        parameters -= size // experts * (experts - layer.top_k)
    return parameters


def check_plan(plan: ExpertPlan, model: OpenModel) -> tuple[Head, ...]:
    """Refuse a plan that was made for another model, or for one with another head; returns the
    heads that it keeps."""
    heads = kept_heads(model, [layer.module for layer in plan.layers])
    check_layers(plan, (*model.architecture.layers, *(head.named for head in heads)))
    modules = {head.named.name for head in heads}
    for layer in plan.layers if plan.head_experts is not None else ():
        experts = plan.head_experts if layer.module in modules else plan.experts
        if len(layer.groups) != experts:
            raise CompressionError(
                f"{layer.module} keeps {len(layer.groups)} experts, but the plan {experts} there; "
                "make them equal"
            )
    return heads


Produce = Callable[[str], Named]  # makes the tensors of a decoder layer


def cut_outputs(
    model: OpenModel,
    plan: ExpertPlan,
    files: CutFiles | None,
    conversion: Conversion | None,
    decoder_layers: Sequence[str],
) -> tuple[list[OutputTensor], Produce]:
    """Return the tensors of these decoder layers, and what makes them: picked and mixed from the
    stored ones, or made by a `conversion` of loaded layers, which `files` may have cut already."""
    roles = {
        name: role
        for name, role in model.layout.roles.items()
        if role.decoder_layer in decoder_layers
    }
    if conversion is None:
        outputs = plan_outputs(model.checkpoint, roles, plan, decoder_layers)
        return outputs, bind(stored_decoder_layer, outputs)
    partial = conversion.partial
    conversion = replace(conversion, own=own_outputs(model, partial, plan, roles))
    produce = bind(conversion.produce, bind(cut_or_kept, partial, plan, files))
    return conversion.outputs(decoder_layers), produce


def conversion_of(model: OpenModel, partial: PartialModel, experts: int) -> Conversion:
    """Return how output with this number of experts is made through a model."""
    small = build_meta(model.architecture.with_experts(experts), partial.dtype)
    return Conversion(partial, model.architecture, small, computing=model.partial.dtype)


def own_outputs(
    model: OpenModel, partial: PartialModel, plan: ExpertPlan, roles: Mapping[str, Role]
) -> dict[str, OutputTensor]:
    """Return a plan's tensors, as base and plan alone give them, whose dtype is not that of the
    `partial` model."""
    parts = model.architecture.layers[0].parts
    is_quantized = model.layout.quantized
    tensors = model.checkpoint.tensors
    whole = {
        name: role
        for name, role in roles.items()
        if tensors[name].is_plain and (role.kind == "plain" or (parts == 1 and not is_quantized))
    }
    outputs = plan_outputs(model.checkpoint, whole, plan, model.architecture.decoder_layers)
    for name, role, _, stored in (
        expert_slots(roles, plan.by_module, parts) if parts > 1 and not is_quantized else ()
    ):
        infos = [tensors[member] for member, _ in stored]
        outputs.append(OutputTensor(name, widest(infos), infos[0].shape, role.decoder_layer))
    return {output.name: output for output in outputs if output.dtype != DTYPE_NAMES[partial.dtype]}


def _cut_head(
    model: OpenModel, head: Head, plan: ExpertPlan, files: CutFiles | None
) -> tuple[list[OutputTensor], Produce, dict[str, str | None]]:
    """Return a head's tensors under their stored names, what makes them, and what experts' names
    become (None: dropped).

    What goes through the head's model does so in the checkpoint's own dtype.
    """
    layer = next(entry for entry in plan.layers if entry.module == head.named.name)
    alone = ExpertPlan.of([replace(layer, module=head.layer.name)])
    small = head.model
    name_of = head.stored_name
    conversion = None
    if through_model(small.layout, plan, files is not None):
        computing = stored_dtype(model), torch.device("cpu")
        partial = PartialModel(small.checkpoint, small.config, *computing)
        conversion = conversion_of(small, partial, alone.experts)
    inner = head.layer.decoder_layer
    tensors, produce = cut_outputs(small, alone, files, conversion, [inner])
    stored = head.names.decoder_layer
    outputs = [
        replace(output, name=name_of(output.name), decoder_layer=stored) for output in tensors
    ]

    def renamed(decoder_layer: str) -> Named:
        return ((name_of(name), content) for name, content in produce(inner))

    renames: dict[str, str | None] = {
        name_of(old): None if new is None else name_of(new)
        for old, new in expert_renames(small.architecture, small.layout, alone).items()
    }
    return outputs, renamed, renames


def _verify(
    model: OpenModel, experts: int, head_experts: int, names: list[str], folder: Path
) -> None:
    """Check a written folder against the stock model of its config, and the heads whose tensors
    have these `names`."""
    config = load_config(folder)
    for path, expected in {
        model.architecture.count_field: experts,
        **model.architecture.written,
    }.items():
        value = attrgetter(path)(config)
        if value != expected:
            raise CompressionError(
                f"the written config says {path} {value} instead of {expected}; please report "
                "this model"
            )
    verify_checkpoint(folder, experts, names)
    check_carried(folder, model.source.folder)
    heads = find_heads(open_model(locate(str(folder)))) if names else ()
    missing = set(names) - {name for head in heads for name in head.names.stored}
    if missing or any(head.layer.experts != head_experts for head in heads):
        raise CompressionError(
            "the written multi-token-prediction heads lack "
            f"{', '.join(sorted(missing)) or 'the planned experts'}; please report this model"
        )


def make_job(
    model: OpenModel,
    plan: ExpertPlan,
    cut: CutFiles | None = None,
    through: PartialModel | None = None,
) -> OutputJob:
    """The job of writing a plan; a correction needs its `cut` layers.

    All tensors are made `through` a model in the dtype of the output where one is given.
    """
    architecture = model.architecture
    layout = model.layout
    stored = model.checkpoint
    partial = through
    decoder_layers = ["", *architecture.decoder_layers]
    if model.stored_parts and plan.is_drop and cut is None and through is None:
        outputs = model.stored_parts.cut(model, plan)
        produce: Produce = bind(stored_decoder_layer, outputs)
    else:
        if through is None and (model.is_split or through_model(layout, plan, cut is not None)):
            partial = stored_partial(model)
        conversion = None if partial is None else conversion_of(model, partial, plan.experts)
        outputs, produce = cut_outputs(model, plan, cut, conversion, decoder_layers)
    produced_by = dict.fromkeys(decoder_layers, produce)
    heads = check_plan(plan, model)
    copies = dict[str, OutputTensor]()  # beside the layers of heads
    head_renames: dict[str, str | None] = {}
    for number, head in enumerate(heads):
        files = None if cut is None else cut.of_head(number)
        tensors, renamed, renames = _cut_head(model, head, plan, files)
        outputs = [*outputs, *tensors]
        head_renames |= renames
        decoder_layer = head.names.decoder_layer
        produced_by[decoder_layer] = renamed
        for name in head.names.parts.values():  # what heads share is copied with the first
            copies.setdefault(name, OutputTensor.copy(stored, name, decoder_layer))
    all_outputs = (*outputs, *copies.values())
    of_heads = [output.name for output in all_outputs if output.decoder_layer not in decoder_layers]

    def produced(decoder_layer: str) -> Named:
        yield from produced_by[decoder_layer](decoder_layer)
        yield from stored_decoder_layer(copies.values(), decoder_layer)

    dequantized = None
    if partial is not None and layout.quantized:
        dequantized = str(partial.dtype).removeprefix("torch.")
    config, zeroed = output_config(
        stored.raw_config, architecture, layout, plan, dequantized, head_renames, len(heads)
    )
    files_beside = files_with(model, config)
    quantization = files_beside.pop(MODELOPT, None)
    if quantization is not None and dequantized is None:
        moved = all_renames(architecture, layout, plan, head_renames)
        files_beside[MODELOPT] = json_bytes(
            renumbered_quantization(modelopt_file(stored.folder), moved)
        )
    if dequantized is not None and through is None:
        sizes = Size.of(all_outputs).bytes, Size.of(stored.tensors.values()).bytes
        message = (
            "changed experts cannot stay quantised, so all weights are written in %s: %s, "
            "the source has %s"
        )
        logger.warning(message, dequantized, *map(human_bytes, sizes))
    return OutputJob(
        outputs=all_outputs,
        decoder_layers=tuple(produced_by),
        produce=produced,
        files=files_beside,
        verify=bind(_verify, model, plan.experts, plan.head_experts or plan.experts, of_heads),
        zeroed=tuple(zeroed),
        left_out=left_out_of(model, heads),
        heads=heads,
    )


def left_out_of(model: OpenModel, heads: Sequence[Head] = ()) -> tuple[str, ...]:
    """Return the tensors of the input that neither the stock model nor one of these heads loads."""
    kept = {name for head in heads for name in head.names.stored}
    return tuple(name for name in model.layout.left_out if name not in kept)


def untouched(model: OpenModel) -> ExpertPlan:
    """Return the plan that keeps every expert, those of multi-token-prediction heads too."""
    whole = ExpertPlan.whole(model)
    if model.is_split:
        return whole
    heads = fitting_heads(model, whole.experts)
    kept = [LayerPlan.keep(head.named, range(head.layer.experts)) for head in heads]
    return ExpertPlan.of([*whole.layers, *kept], heads[0].layer.experts if heads else None)


def copy_job(model: OpenModel) -> OutputJob:
    """Return the job that writes a model as it is."""
    return make_job(model, untouched(model))


def rewritten(job: OutputJob, change: Change, config: Json | None = None) -> OutputJob:
    """Return the job with each stored tensor changed, and with these fields of config.json.

    `change` has to work on tensors without data (on the device "meta"), too: shapes and dtypes are
    known by that."""
    stored = {output.name: output for output in job.outputs}
    outputs = []
    for output in job.outputs:
        empty = torch.empty(output.shape, dtype=TORCH_DTYPES[output.dtype], device="meta")
        value = change(output.name, empty)
        dtype = DTYPE_NAMES[value.dtype]
        outputs.append(replace(output, dtype=dtype, shape=tuple(value.shape), content=None))

    def produce(decoder_layer: str) -> Named:
        for name, pieces in job.produce(decoder_layer):
            output = stored[name]
            data = torch.frombuffer(bytearray().join(pieces), dtype=TORCH_DTYPES[output.dtype])
            yield name, iter((tensor_bytes_view(change(name, data.view(output.shape))),))

    stated = job.files["config.json"]
    assert isinstance(stated, bytes)
    files = {**job.files, "config.json": json_bytes({**json.loads(stated), **(config or {})})}
    return replace(job, outputs=tuple(outputs), produce=produce, files=files)


def rewritten_size(
    model: OpenModel, experts: int, change: Change, changed: bool = False
) -> OutputSize:
    """Return the size of `rewritten` output with this number of experts in each layer; no weight is
    read.

    `changed`: other steps write experts anew, in a plain dtype.
    """
    through = stored_partial(model) if changed else None
    job = make_job(model, even_plan(model, experts), through=through)
    return OutputSize(Size.of(rewritten(job, change).outputs))
