"""The price of a size: against what stock transformers says of the pruned model, and bytes on disk."""

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compressor.pipeline.resolve import open_run, read_calibration
from compressor.progress import SILENT
from compressor.recipe.step import TextOptions
from compressor.report.price import prices
from compressor.steps.prune.options import Prune
from compressor.steps.prune.planning import Planner, spec_of
from tests.support import small, zoo
from tests.support.command_line import Run

pytestmark = pytest.mark.usefixtures("offline")


@torch.no_grad()
def log_probabilities(folder: Path, batch: torch.Tensor, kept: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
    """Of stock transformers, with these experts of each layer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer, rows in zip(model.model.layers, kept or [], strict=kept is not None):
        for module, name in (
            (layer.mlp.experts, "gate_up_proj"),
            (layer.mlp.experts, "down_proj"),
            (layer.mlp.gate, "weight"),
        ):
            setattr(module, name, torch.nn.Parameter(getattr(module, name)[list(rows)]))
        layer.mlp.experts.num_experts = len(rows)
    return model(batch).logits[:, :-1].double().log_softmax(dim=-1)


def test_what_fits_costs_less_than_the_same_experts_do_by_stock_without_a_refit(tmp_path: Path, run: Run) -> None:
    folder, text = small.save(tmp_path / "m"), str(small.text_file(tmp_path))
    options = {"samples": 16, "sequence_length": 16}
    with open_run(str(folder), device="cpu") as session:
        asked = TextOptions(data=(text,), **options)
        data, found = read_calibration(session, asked, 0, 0.5), prices(session, asked)
        spec = spec_of(Prune(experts=found[0].experts), session.model)
        plan = Planner(session.model, data, SILENT).plans([spec])[0].plan
    kept = [[group.members[0] for group in layer.groups] for layer in plan.layers]
    assert [price.share for price in found] == [Fraction(3, 4), Fraction(1, 2), Fraction(1, 3)]
    price = found[0]
    assert price.experts is not None and price.pruned is not None
    batch = torch.cat(data.heldout_batches)
    base, made = log_probabilities(folder, batch), log_probabilities(folder, batch, kept)
    # the same experts, before they are refitted
    assert 0 < price.pruned.kl <= float((base.exp() * (base - made)).sum(-1).mean())
    smaller = zoo.build("mixtral", vocab_size=small.VOCABULARY, num_local_experts=price.experts)
    nbytes = sum(value.nbytes for value in smaller.state_dict().values())
    assert nbytes <= price.bytes
    command = ("inspect", folder, "--calibration", text, "--samples", 16, "--sequence-length", 16)
    shown = json.loads(run(*command, "--json").out)["prices"]
    assert [each["experts"] for each in shown] == [each.experts for each in found]
    assert "Price: KL from this model" in run(*command).out
    assert "which names one" in run("inspect", folder, "--samples", 16).err
