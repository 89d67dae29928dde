"""The step `routers`: router calibration, which moves router weights or biases toward the base,
after C3PO."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from torch import Tensor

from compressor.data.sources import TextPart
from compressor.distributed import ranks, refuse_several
from compressor.divergence.evaluator import Evaluator, accepts, require_enough
from compressor.document.blocks import Block, Table, Text
from compressor.entry_points import ROUTER_SHIFTS, load_only
from compressor.errors import CompressionError
from compressor.formatting import short
from compressor.model.opened import OpenModel
from compressor.model.router_logits import router_weight
from compressor.recipe.step import StepOptions
from compressor.recipe.steps_plan import PlannedStep
from compressor.steps.routers.options import Routers
from compressor.steps.routers.weights import (
    Answered,
    Calibrated,
    RouterShift,
    bias_places,
    calibrate_bias,
    calibrate_weights,
)
from compressor.steps.section import Section, divergence, is_changed
from compressor.steps.step import Requirements, Result, State, Step
from compressor.tensor_cache import load_tensors, read_metadata, save_tensors

logger = logging.getLogger(__name__)

PLACED = 16  # batches by which the place of a bias is found, and from which its items are taken
ROUNDS = ("round", "ridge", "step", "gain", "± standard error")
FIGURES = ("ridge", "step", "gain", "standard_error")
PLACES = ("layer", "place", "mean", "deviation")


@dataclass(frozen=True)
class RoutersStep(Step[Routers]):
    """Move the routers toward the base on text, as far as that lowers the KL on held-out text."""

    def resolve(self, model: OpenModel) -> Self | None:
        """Return the step; None if nothing is moved."""
        return None if self.options.method == "none" else self

    def requirements(
        self, model: OpenModel, earlier: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Return the need of text of its own; refuse routers whose logits cannot be moved as they
        are stored."""
        options = self.options
        if options.method != "router":
            refuse_several(
                f"routers: method {options.method}",
                "choose the method router, or start one process",
            )
        elif options.reference is not None:
            raise CompressionError(
                "routers: reference is for the methods bias and auto; name one of them, or leave "
                "it out"
            )
        stored_names(model)
        part = TextPart(
            options.sequences, options.sequence_length, min(8, options.sequences // options.rounds)
        )
        # the base's, and forward and back for the gradients
        return Requirements(part=part, passes=2)

    def teacher_batches(self, batches: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the batches that gradients are taken on; a bias needs few, by which its places are
        found."""
        return batches[:PLACED] if self.options.method == "bias" else batches

    def write(self, state: State) -> Result:
        """Move the routers as far as that lowers the KL on held-out text; new ones are kept until
        they are in place.

        Raises `CompressionError` for fewer than eight held-out sequences.
        """
        path = state.kept("routers.safetensors")
        if ranks().broadcast(lambda: read_metadata(path)) is None:
            tensors, figures = self._calibrated(state)
            if ranks().is_first:
                save_tensors(path, tensors, figures)
        figures = ranks().broadcast(lambda: read_metadata(path))
        return Result(figures, iter([load_tensors(path)] if ranks().is_first else ()))

    def _calibrated(self, state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return stored router tensors by name, as they are to be written, and a plan's figures, in
        nats per token.

        `auto` takes the method of least KL on held-out text.
        """
        model = state.model
        method = self.options.method
        forced = self.options.accept == "always"
        shift = None
        if method != "router":
            # which measures how a bias should move logits
            router_shift = load_only(ROUTER_SHIFTS)
            shift = router_shift(model, self.options.reference, self.options.optimizer)
        batches, answers, evaluator = state.teacher_outputs()
        require_enough(evaluator.sequences, "routers")
        text = list(zip(batches, answers, strict=True))
        methods = ["router", "bias"] if method == "auto" else [method]
        tried = {}
        for name in methods:
            try:
                if name == "router":
                    assert state.text is not None
                    count = self.options.rounds
                    rounds = [text[first::count] for first in range(count)]
                    fit = [part[ranks().rank :: ranks().size] for part in rounds if part]
                    weights = {
                        key: model.checkpoint.read(stored)
                        for key, stored in stored_names(model).items()
                    }
                    given = evaluator, state.progress, state.text.emphasis, forced
                    tried[name] = calibrate_weights(model, weights, fit, *given)
                else:
                    tried[name] = self._by_bias(state, text[:PLACED], evaluator, shift)
            except CompressionError as error:
                if name == methods[-1] and not tried:
                    raise
                logger.warning("%s; it is left out", error)  # the other method may fit the model
        kl = {name: calibrated.after.means["kl"] for name, calibrated in tried.items()}
        taken = min(kl, key=lambda name: kl[name])
        best = tried[taken]
        before = best.before.means
        after = best.after.means
        figures: dict[str, Any] = {"before": before["kl"], "after": after["kl"]}
        for name in ("loss", "flips"):
            figures |= {f"{name}_before": before[name], f"{name}_after": after[name]}
        if forced:
            figures |= {"changed": True, "confirmed": accepts(best.before, best.after)}
        figures |= {
            "sequences": best.before.sequences,
            "steps": [asdict(step) for step in best.steps],
            **best.details,
        }
        if len(methods) > 1:
            figures |= {
                "taken": taken if any(step.step for step in best.steps) else "none",
                "tried": kl,
            }
        names = stored_names(model, best.weights)
        return {names[key]: weight for key, weight in best.weights.items()}, figures

    def _by_bias(
        self, state: State, text: Answered, evaluator: Evaluator, shift: Any
    ) -> Calibrated:
        """Return routers with the average optimised pathway as a bias; this loads the smaller model
        whole."""
        model = state.model
        average: RouterShift = shift.measure(text, state.progress)
        late = model.architecture.layers[-len(average.logits) :]
        places = bias_places(model, late, [tokens for tokens, _ in text])
        names = stored_names(model, [place.key for place in places])
        stored = {key: model.checkpoint.read(name) for key, name in names.items()}
        layers = [
            {
                "layer": place.layer,
                "place": place.kind,
                "mean": place.mean,
                "deviation": place.deviation,
            }
            for place in places
        ]
        details = {"items": average.items, "agreement": average.agreement, "layers": layers}
        forced = self.options.accept == "always"
        calibrated = calibrate_bias(
            model, stored, places, average, evaluator, state.progress, forced
        )
        return replace(calibrated, details=details)

    def describe(self, planned: PlannedStep) -> Section:
        """Describe the method, KL before and after, each round and a bias's places; gains are in
        nats per token."""
        result = planned.result or {}
        moved = is_changed(planned)
        took = f", took {result['taken']}" if "taken" in result else ""
        limits = []
        if moved:
            limits.append(
                "Router calibration moved the routers alone toward the base's next token, on text "
                "of its maker's."
            )
        if "confirmed" in result:
            the = "the" if result["confirmed"] else "no"
            took += f", forced; held-out text confirms {the} gain"
            if not result["confirmed"]:
                limits.append(
                    "It was forced (routers.accept: always): held-out text did not confirm that "
                    "it is a gain."
                )
        outcome = f"{'' if moved else 'the routers stay as they are; '}{divergence(result, moved)}"
        blocks: list[Block] = []
        rounds = []
        for number, step in enumerate(result.get("steps", ()), 1):
            figures = [short(step.get(name)) if step.get("step") else "-" for name in FIGURES]
            rounds.append((str(number), *figures))
        if rounds:
            blocks.append(Table("Rounds of the router calibration", ROUNDS, rounds))
        places = []
        for layer in result.get("layers", ()):
            closeness = [short(layer.get(name)) for name in ("mean", "deviation")]
            places.append((str(layer.get("layer", "-")), layer["place"], *closeness))
        if places:
            blocks.append(Table("Places of the bias", PLACES, places, PLACES[:2]))
        if any("selection bias" in place for place in places):
            blocks.append(
                Text("A selection bias moves which experts are chosen, not their weights.")
            )
        return Section(
            self.name,
            f"Router calibration ({self.options.method}{took}): {outcome}",
            ways=["router calibration"] if moved else [],
            tuned="model" if moved else "",
            blocks=blocks,
            limits=limits,
        )


def stored_names(model: OpenModel, keys: Iterable[str] | None = None) -> dict[str, str]:
    """Stored tensors by state-dict key, by default of all router weights; refuses one that is not
    stored plain."""
    known = model.partial.plain_keys
    if keys is None:
        keys = [router_weight(layer) for layer in model.architecture.layers]
    stored = {}
    for key in keys:
        names = [
            name
            for name, target in known.targets.items()
            if target == key and known.patterns[name] is None
        ]
        infos = [model.checkpoint.tensors[name] for name in names]
        if (
            len(infos) != 1
            or not infos[0].is_plain
            or infos[0].shape != tuple(model.partial.empty[key].shape)
        ):
            raise CompressionError(
                f"{key} is not stored as one tensor of plain numbers, so it cannot be calibrated; "
                "leave out routers"
            )
        stored[key] = names[0]
    return stored
