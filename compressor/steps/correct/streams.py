"""The base's own hidden states around a layer that is refitted.

B sequences, L tokens, H hidden.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.streaming import ActivationOffload, Forward, LayerVisitor, Replay, hidden_of

TOWARD = 0.5  # the default share of the way to the base's own hidden states
BENT = 0.25  # share by which twice an output may move the hidden states otherwise than twice as far


class EarlyBatches(LayerVisitor):
    """Batches that pass a layer before it has its final form, in a replay, and wait behind it for
    the others."""

    def __init__(self, offload: ActivationOffload) -> None:
        self.offload = offload
        self.outputs: dict[int, Any] = {}  # of the loaded layer, by batch
        self.passing = False

    def pass_early(
        self, replay: Replay, numbers: Iterable[int], layer_forward: Forward | None = None
    ) -> None:
        """Have these batches pass the loaded layer as it is, or another forward."""
        self.passing = True
        replay(numbers, layer_forward)
        self.passing = False

    def on_layer_output(self, output: Any) -> None:
        if self.passing:
            self.outputs[self.at.batch] = output
            self.offload.keep(self.at.batch, hidden_of(output))

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        """Return the finished output of a batch that has passed the layer already."""
        if self.at.batch not in self.outputs:
            return layer_forward
        self.offload.forget(self.at.batch)
        output = self.outputs.pop(self.at.batch)
        return lambda *args, **kwargs: output


class BaseStream(EarlyBatches):
    """Batches that pass the base's own layers, numbered behind `count` others of the same text in
    the same order."""

    def __init__(
        self, model: OpenModel, count: int, offload: ActivationOffload, toward: float | None
    ) -> None:
        super().__init__(offload)
        self.model = model
        self.count = count
        # requested share of the way to them; None: the default, if it is defined
        self.toward = toward
        self.last = torch.zeros(0)  # hidden states that came out of a layer
        self.factor = 1.0  # of an expert's output, where it joins the hidden states
        self.share = 0.0  # of the way that the loaded layer goes

    def on_layer_output(self, output: Any) -> None:
        self.last = hidden_of(output)
        super().on_layer_output(output)

    def shift(self, batch: int, hidden: Tensor) -> Tensor | None:
        """Return how far experts' outputs move toward the base's hidden states, [B, L, H] alike;
        None if not at all."""
        if not self.share:
            return None
        return self.share * (
            (hidden_of(self.outputs[batch + self.count]).to(hidden) - hidden) / self.factor
        )

    def find_factor(self, layers: Sequence[MoeLayer], replay: Replay) -> None:
        """Find the factor by which the loaded layer's experts' output is multiplied where it joins
        the hidden states.

        Where it joins them in another way, such as through a norm, or beside that of others, the
        layer's share is 0; raises `CompressionError` where another is asked for."""
        layer, *others = layers
        experts = self.model.partial.model.get_submodule(layer.name)
        sums = torch.zeros(4, dtype=torch.float64)
        outputs = []

        def scaled(scale: float, module: Any, args: Any, value: Tensor) -> Tensor:
            outputs.append(as_float64(value.detach()).flatten())
            return value * scale

        for number in sorted(self.outputs)[:1]:
            hidden = []
            for scale in (0.0, 2.0, 1.0):
                with experts.register_forward_hook(partial(scaled, scale)):
                    replay([number])
                hidden.append(as_float64(self.last).flatten())
            output = outputs[-1] if outputs else torch.zeros(0)
            twice = hidden[1] - hidden[0]
            once = hidden[2] - hidden[0]
            if not others and output.numel() == once.numel():
                bent = (twice - 2 * once).square().sum()
                sums += torch.stack([once @ output, output @ output, once @ once, bent]).cpu()
            else:
                sums[3] = torch.inf
        along, size, moved, bent = ranks().all_reduce(sums).tolist()
        unknown = bent > BENT**2 * moved
        if unknown and self.toward is not None:
            raise CompressionError(
                f"{layer.name}: its experts' output is changed before it joins the hidden states, "
                "so the target for "
                "those is unknown; leave out correct.toward"
            )
        share = TOWARD if self.toward is None else self.toward
        self.share = 0.0 if unknown else share
        self.factor = along / size if along and size else 1.0
