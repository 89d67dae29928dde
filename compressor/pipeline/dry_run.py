"""Dry runs of recipes, from configs and headers alone: nothing is written, and no weight or text is
read."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Self

from compressor.checkpoint.reader import Size
from compressor.data.batches import TextSpec
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.inspection import read_headers
from compressor.model.opened import OpenModel, advice_on, open_checkpoint, served_model
from compressor.model.serving import Advice
from compressor.model.streaming import DEFAULT_ACTIVATION_BUDGET
from compressor.pipeline.compress import largest_tried
from compressor.pipeline.formats import formats_of
from compressor.pipeline.gate import request_of
from compressor.pipeline.resolve import ResolvedRecipe, prepare, text_specs
from compressor.pipeline.run import earlier_plan
from compressor.quality_gate.run import PowerAnalysis, passable
from compressor.recipe.recipe import Recipe
from compressor.records import Json, plain_json
from compressor.steps.job import output_size
from compressor.steps.step import OWN, part_name

EVALUATION = "to compare output and base on, a pass of each"


@frozen
class Shape:
    """The numbers of a model's config and files; `layer_` ones count a layer's routed experts and
    router."""

    num_experts: int
    num_experts_per_tok: int
    width: int
    layer_parameters: int
    layer_bytes: int
    parameters: int
    bytes: int


@frozen
class TextNeed:
    """A text that is read: sequences to fit on, with a held-out share, and sequences that single
    steps train on."""

    sources: tuple[str, ...]
    samples: int
    sequence_length: int
    heldout: float
    # of steps, and what is held out: sequences, and tokens of each
    parts: tuple[tuple[str, int, int], ...]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.samples * self.sequence_length + sum(
            count * length for _, count, length in self.parts
        )

    @classmethod
    def of(cls, spec: TextSpec, steps: Mapping[str, str]) -> Self:
        """Return the need of a text spec; `steps` has the step of each of its parts."""
        parts = [(steps[name], part.sequences, part.length) for name, part in spec.parts.items()]
        parts += [("held out", spec.heldout_wanted, spec.heldout_length)] if parts else []
        parts += [(EVALUATION, spec.evaluation, spec.heldout_length)] if spec.evaluation else []
        sources = tuple(entry.source for entry in spec.heaviest().sources)
        return cls(sources, spec.samples, spec.sequence_length, spec.heldout, tuple(parts))


@frozen
class DryRun:
    """The content of `--dry-run`."""

    model: str
    revision: str | None
    family: str
    moe_layers: int
    # name, options, and passes of its text through a model
    steps: tuple[Json, ...]
    notes: tuple[str, ...]
    before: Shape
    after: Shape
    servers: Advice
    texts: tuple[TextNeed, ...]
    weights: int  # bytes of the model in the computing dtype, which stay in memory where they fit
    layers_memory: int  # bytes of two of the largest decoder layer
    activations: int  # bytes of hidden states, above 4 GiB in files
    samples: int  # bytes of all experts' outputs on the sampled tokens of an MoE layer
    whole_memory: int  # bytes of a model that is trained in memory, with the optimizer's state
    gate: PowerAnalysis | None = None  # what the recipe's gate can show

    @property
    def memory(self) -> int:
        """Bytes in memory, by the rule of docs/how-to/large-models.md."""
        streamed = (
            self.layers_memory + min(self.activations, DEFAULT_ACTIVATION_BUDGET) + self.samples
        )
        return max(streamed, self.whole_memory)

    def to_dict(self) -> Json:
        """JSON types."""
        texts = [{**asdict(text), "tokens": text.tokens} for text in self.texts]
        content = {**asdict(self), "texts": texts, "memory": self.memory}
        del content["gate"]
        return content if self.gate is None else {**content, "gate": plain_json(self.gate)}


def dry_run(recipe: Recipe) -> DryRun:
    """Return what a recipe will do; raises every `CompressionError` that a run raises before it
    reads text."""
    recipe.check_installed()
    formats_of(recipe)
    shown = None
    if recipe.gate is not None:
        request = request_of(recipe)
        if recipe.gate.search:
            recipe, request = largest_tried(recipe, request)
        shown = passable(request.power)
    if not isinstance(recipe.model, str):
        raise CompressionError(
            "a dry run reads the headers of a checkpoint; name the model's folder or Hub id"
        )
    source, checkpoint = read_headers(recipe.model, recipe.revision)
    model = base = open_checkpoint(source, checkpoint, recipe.dtype, "cpu")
    # of the Hub, headers come without tokenizers to compare
    if recipe.base is not None and source.revision is None:
        of_base, headers = read_headers(recipe.base, recipe.base_revision)
        base = model if of_base.revision else open_checkpoint(of_base, headers, recipe.dtype, "cpu")
    resolved = prepare(recipe, model, base, earlier_plan(model))
    experts = resolved.counts[-1]
    changed = any(step.options.rewrites for step in resolved.steps)
    before = _shape(model, model.architecture.experts, partial(output_size, model))
    after = _shape(
        resolved.view,
        experts,
        lambda count: resolved.output_size(len(resolved.steps) - 1, count, changed).size,
    )
    names = {part_name(number): step.name for number, step in enumerate(resolved.steps)}
    texts = tuple(
        TextNeed.of(spec, names if number is None else {OWN: resolved.steps[number].name})
        for number, spec in text_specs(resolved)
    )
    hidden = int(model.config.get_text_config().hidden_size) * model.partial.dtype.itemsize
    read = max((text.samples * text.sequence_length for text in texts), default=0)
    sampled = [
        needed.sample_bytes * min(needed.sample_tokens or read, read)
        for needed in resolved.requirements
    ]
    copies = max(needed.hidden_copies for needed in resolved.requirements)
    fitted = [copies * text.samples * text.sequence_length for text in texts]
    trained = [count * length for text in texts for _, count, length in text.parts]
    steps = []
    for step, need in zip(resolved.steps, resolved.requirements, strict=True):
        passes = need.passes if texts else 0
        steps.append({"name": step.name, "options": step.options.to_dict(), "passes": passes})
    return DryRun(
        model=source.label,
        revision=source.revision,
        family=model.architecture.family,
        moe_layers=len(model.architecture.layers),
        steps=tuple(steps),
        notes=tuple(note for need in resolved.requirements for note in need.notes),
        before=replace(before, **asdict(Size.of(checkpoint.tensors.values()))),
        after=after,
        servers=servers_after(resolved),
        texts=texts,
        weights=model.partial.nbytes,
        layers_memory=2 * model.largest_layer,
        activations=hidden * max([*fitted, *trained], default=0),
        samples=max(sampled),
        whole_memory=max(need.parameter_bytes for need in resolved.requirements) * after.parameters,
        gate=shown,
    )


def servers_after(resolved: ResolvedRecipe) -> Advice:
    """Return advice on which servers load the final model."""
    return advice_on(
        served_model(resolved.view), resolved.view.architecture.layers, resolved.counts[-1]
    )


def _shape(model: OpenModel, experts: int, sized: Callable[[int], Size]) -> Shape:
    """Return the numbers of the model with this number of experts in each layer.

    The size of a layer's experts is measured by how the model's size changes with their number.
    """
    layers = model.architecture.layers
    served = served_model(model)
    difference = (
        -layers[0].routing_groups if experts == layers[0].experts else layers[0].routing_groups
    )
    size = sized(experts)
    other = sized(experts + difference)

    def of_layer(one: int, two: int) -> int:
        return (two - one) // difference * experts // len(layers)

    layer = of_layer(size.parameters, other.parameters), of_layer(size.bytes, other.bytes)
    return Shape(experts, served.top_k, served.width, *layer, size.parameters, size.bytes)
