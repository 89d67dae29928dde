"""The bake of a bias for each expert: the average optimised pathway, as far as held-out text likes it.

The literal reading of C3PO (arXiv:2504.07964) for a stock checkpoint: the mean over items of optimised less own router
logits, in the layers that C3PO moves.
"""

from collections.abc import Sequence

from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.steps.routers.average import Average
from compressor.steps.routers.bias_places import BiasPlace
from compressor.steps.routers.judging import Baked, Text, Weights, gained, judged

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the average, that are tried
LARGEST = 64.0  # a scale that is the best and the largest of those tried is doubled up to here


def bake_bias(
    model: OpenModel, own: Weights, places: Sequence[BiasPlace], average: Average, heldout: Text, progress: Progress
) -> Baked:
    """The tensors `own` with the average pathway in them, at the scale that `heldout` likes best; none may be that.

    `places` are of late layers, whose tensors `own` holds by state-dict key as they are stored.
    """
    progress.start("try the biases", 1)
    late = [layer.name for layer in model.architecture.layers[-len(average.logits) :]]

    def moved(scale: float) -> Weights:
        made = dict(own)
        for place in places:
            number = late.index(place.layer)
            logits, scores = scale * average.logits[number], scale * average.scores[number]
            made[place.key] = place.moved(own[place.key], logits, scores)
        return made

    tried = [(scale, moved(scale)) for scale in SCALES]
    before, *found = judged(model, heldout, [own, *(trial for _, trial in tried)])
    (scale, weights), after = min(zip(tried, found, strict=True), key=lambda pair: float(pair[1].mean()))
    largest = max(SCALES)
    while scale == largest and 2 * scale <= LARGEST:
        largest = 2 * scale
        again = moved(largest)
        (found_again,) = judged(model, heldout, [again])
        if float(found_again.mean()) < float(after.mean()):
            scale, weights, after = largest, again, found_again
    progress.advance("")
    step = gained(before, after, 0.0, scale)
    kept, last = (weights, after) if step.step else (own, before)
    return Baked(kept, float(before.mean()), float(last.mean()), (step,))
