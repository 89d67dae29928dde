"""What experts do to later routers, for all who ask: routing attribution, run when it is first asked for, and once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.attribution import measure
from compressor.attribution.figures import Attribution
from compressor.data.batches import Calibration
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.recipe.registry import Strategy
from compressor.statistics.statistics import needs_attribution


@dataclass(slots=True)
class Steering:
    """The attribution of the original model on the calibration's tokens, without what is held out, all counting alike.

    It stands for every plan of a run: those made in order, and those of each source alone. Ranks share its batches.
    """

    model: OpenModel
    calibration: Calibration | None
    progress: Progress
    seed: int = 0
    _found: Attribution | None = None

    def attribution(self) -> Attribution:
        """The attribution; raises `CompressionError` where there is no text or the model cannot be attributed.

        All ranks ask for it together, and it is the same at all of them.
        """
        if self.calibration is None:
            raise CompressionError("routing attribution needs calibration data; pass --calibration")
        if self._found is None:
            self._found = measure.attribute(self.model, fit_batches(self.calibration), self.progress, self.seed)
        return self._found

    def rank_changes(self, strategies: Sequence[Strategy]) -> dict[str, Tensor]:
        """AARV summed over the later routers, [E] float64, by layer; nothing if none of the strategies needs it."""
        asking = next((each.name for each in strategies if needs_attribution(each.needs)), None)
        if asking is None:
            return {}
        found = self._rank_changes(asking)
        return dict(here().broadcast_tensors(lambda: found))

    def _rank_changes(self, asking: str) -> dict[str, Tensor]:
        try:
            senders = self.attribution().of_kind("expert")
        except CompressionError as error:
            raise CompressionError(
                f"strategy {asking!r} needs routing attribution, which others do not: {error}"
            ) from error
        layers = self.model.architecture.layers
        found = {layer.name: torch.zeros(layer.experts, dtype=torch.float64) for layer in layers}
        for sender in senders:
            assert sender.number is not None
            found[sender.module][sender.number] = sender.total_rank_change
        return found


def fit_batches(calibration: Calibration) -> Calibration:
    """The calibration without what is held out, which nothing that decides a plan may see."""
    return Calibration(
        tuple(calibration.batches[number] for number in calibration.fit),
        calibration.identity,
        sources=tuple(calibration.source_of(number) for number in calibration.fit),
        weights=calibration.weights,
    )
