"""Options of the command line that let a gate's compressed model answer on optimised pathways (C3PO)."""

from dataclasses import dataclass, fields
from pathlib import Path

from compressor.cli.parameters import ROUTING, described
from compressor.errors import CompressionError
from compressor.pathways.options import KERNELS, METHOD, OPTIMIZERS, OWN, PathwayOptions, Routing

USUAL = PathwayOptions()
JUDGED = ", ".join(name for name in OPTIMIZERS if name != "oracle")
FIELDS = {"pathway_layers": "layers", "pathway_experts": "experts", "pathway_tokens": "tokens"}  # called otherwise


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How the compressed model is routed; what is not given is as `PathwayOptions` has it."""

    routing: str | None = described(
        None, ROUTING, "c3po: the compressed model answers on pathways optimised by those of a reference set."
    )
    reference: Path | None = described(
        None, ROUTING, "The compressed model's own reference set, a folder of `moe-compress reference`."
    )
    optimizer: str | None = described(None, ROUTING, f"{JUDGED} (default: {USUAL.optimizer}).")
    neighbours: int | None = described(
        None, ROUTING, f"Nearest items of the reference set (default: {USUAL.neighbours})."
    )
    radius: float | None = described(None, ROUTING, "Instead: all items within this distance, from 0 to 2.")
    pathway_layers: int | None = described(None, ROUTING, f"The last MoE layers (default: {USUAL.layers}).")
    pathway_experts: int | None = described(
        None, ROUTING, f"Of each layer, the experts of largest weight that are moved (default: {USUAL.experts})."
    )
    pathway_tokens: str | None = described(
        None, ROUTING, f"last (of the prompt), or scored: all that an answer hangs on (default: {USUAL.tokens})."
    )
    kernel: str | None = described(None, ROUTING, f"{', '.join(KERNELS)} (default: {USUAL.kernel}).")
    bandwidth: float | None = described(None, ROUTING, "Of the kernel (default: the neighbours' mean distance).")
    share: float | None = described(
        None, ROUTING, "Of the way to the neighbours, 0 to 1 (default: a line search for kernel, a half for mode)."
    )
    steps: int | None = described(None, ROUTING, f"Of mode and ngd (default: {USUAL.steps}).")
    rate: float | None = described(
        None, ROUTING, f"Of the first step of ngd, in logits for a nat (default: {USUAL.rate:g})."
    )
    embedding: str | None = described(
        None, ROUTING, f"How prompts are compared, as the reference set was told (default: {OWN})."
    )

    def routing_of(self, of_two: bool) -> Routing | None:
        """What is asked for, checked; None if both models are to answer as they are. `of_two`: models that exist."""
        given = {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) is not None}
        method = given.pop("routing", None)
        if method is None:
            if given:
                name = f"--{next(iter(given)).replace('_', '-')}"
                raise CompressionError(f"{name} goes with --routing {METHOD}; add that, or leave {name} out")
            return None
        if method != METHOD:
            raise CompressionError(f"there is no routing {method!r}; known is {METHOD}")
        if (reference := given.pop("reference", None)) is None:
            raise CompressionError(
                f"--routing {METHOD} takes a reference set of the compressed model; make one with `moe-compress "
                "reference` and name it with --reference"
            )
        if not of_two:
            raise CompressionError(f"--routing {METHOD} judges a model that has a reference set; name two models")
        embedding = given.pop("embedding", OWN)
        options = PathwayOptions(**{FIELDS.get(name, name): value for name, value in given.items()})
        return Routing(reference, options, embedding)
