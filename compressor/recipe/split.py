"""What a plan says of a split, as far as it can be checked without the model."""

from collections.abc import Mapping
from typing import Any

from compressor.errors import CompressionError
from compressor.recipe.plan_json import integer

MOST_PARTS = 64  # of an expert
ENERGY, CLUSTERS, WEIGHTS = "energy", "clusters", "weights"  # how neurons are dealt out; the last without text


def check_split(split: Mapping[str, Any]) -> None:
    """Raise `CompressionError` for an entry that cannot be of any model."""
    if not 2 <= integer(split.get("parts"), "the split's parts") <= MOST_PARTS:
        raise CompressionError(f"the split's parts are {split['parts']}, not 2 to {MOST_PARTS}; restore it")
    if not isinstance(split.get("calibration"), Mapping | None):
        raise CompressionError("the split's calibration should be an object or null; restore it")
    told = split.get("neurons")
    if not isinstance(told, Mapping) or not all(isinstance(text, str) for text in told.values()):
        raise CompressionError("the split should say for each module where its neurons go; split or plan again")


def told_split(split: Mapping[str, Any]) -> str:
    """What was done to every expert, in words."""
    ways = {ENERGY: "by what they do on text", CLUSTERS: "in clusters that fire together"}
    how = ways.get(str(split.get("by")), "by the norms of their weights")
    return f"each of {split.get('experts')} experts into {split.get('parts')} parts, neurons dealt out {how}"


def parts_of(split: Mapping[str, Any] | None) -> int:
    """Parts that each expert became; 1 without a split."""
    return 1 if split is None else int(split["parts"])
