"""The plan that keeps every expert as it is."""

from compressor.model.architecture import Architecture
from compressor.model.opened import OpenModel
from compressor.recipe.layer import LayerPlan
from compressor.recipe.plan import CompressionPlan, Source
from compressor.run_record import versions

KEPT_WHOLE = "none"  # the strategy of a plan that drops and merges nothing


def whole_plan(model: OpenModel, architecture: Architecture) -> CompressionPlan:
    """Of a checkpoint that is written with the layers of `architecture`: its own, or those that it is split to."""
    layers = tuple(LayerPlan.keep(layer, range(layer.experts)) for layer in architecture.layers)
    source = Source(model.source.name, model.source.revision, model.fingerprint)
    return CompressionPlan(source, architecture.experts, KEPT_WHOLE, {}, None, layers, versions=versions())
