"""Routing hubs as hubs.json names them: `attribute` writes that file, `prune` protects by it, and
reports show it."""

from pathlib import Path

from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.records import read_json, value_as

REMEDY = "name a hubs.json that moe-compress attribute has written"


@frozen
class RoutedExpert:
    """One routed expert."""

    module: str
    layer: int
    expert: int

    @property
    def sort_key(self) -> tuple[int, str, int]:
        """The key that sorts experts in model order, and tells them apart."""
        return self.layer, self.module, self.expert

    @property
    def label(self) -> str:
        """The expert's layer and number, such as 'L1 E9'."""
        return f"L{self.layer} E{self.expert}"


@frozen
class Hub(RoutedExpert):
    """An expert whose influence and AARV are both outliers of its layer."""

    influence: float  # summed over the receivers
    aarv: float  # summed over the receivers
    influence_score: float  # modified z-score among the layer's experts
    aarv_score: float
    share: float  # of the tokens, those routed to it


def read_hubs(path: Path) -> tuple[Hub, ...]:
    """Read a hubs.json; raises `CompressionError` for another file."""
    content = read_json(path, REMEDY, REMEDY)
    try:
        hubs: tuple[Hub, ...] = value_as(content, tuple[Hub, ...], "the list of hubs")
    except CompressionError as error:
        raise CompressionError(f"{path}: {error}; {REMEDY}") from error
    return hubs
