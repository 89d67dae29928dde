"""On a CUDA device everything comes out as on the CPU, to float tolerance; skipped where there is none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import compressor
from compressor.answers.answering import Answer
from compressor.answers.options import GenerationOptions
from compressor.answers.prompts import Prompt
from compressor.answers.stock import StockModel
from compressor.checkpoint.source import locate
from compressor.model.opened import open_model
from compressor.model.streaming import LayerVisitor, Pass, ReversePass
from compressor.progress import Silent
from compressor.recipe.step import TextOptions
from compressor.statistics.statistics import collect
from tests.compressor.model.test_reverse import Gathering, loss
from tests.support import small, zoo
from tests.support.plans import pruned
from tests.support.sequential_runs import with_heldout
from tests.support.statistic_groups import DENSE, SAMPLED, SUMS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("offline")]

CLOSE = {"rtol": 1e-3, "atol": 1e-4}
FAMILIES = pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])


def on_both(measure: Any) -> None:
    """Compare what a function of the device gives."""
    torch.testing.assert_close(measure("cuda"), measure("cpu"), **CLOSE)


@FAMILIES
def test_statistics(name: str, tmp_path: Path) -> None:
    stock = zoo.save(name, tmp_path)
    data, needs = with_heldout(stock), (SUMS | SAMPLED | DENSE) - {"router_arguments"}

    def measure(device: str) -> dict[str, Tensor]:
        model = open_model(locate(str(tmp_path)), "float32", device)
        seen = collect(model, needs, data, Silent())
        return {
            f"{stats.layer.name} {name}": torch.as_tensor(value.tolist(), dtype=torch.float64)
            for stats in seen
            for name, value in stats.values.items()
        }

    on_both(measure)


@FAMILIES
def test_outputs_and_gradients(name: str, tmp_path: Path) -> None:
    stock = zoo.save(name, tmp_path)
    parts = with_heldout(stock).batches

    def measure(device: str) -> dict[str, Tensor]:
        model = open_model(locate(str(tmp_path)), "float32", device)
        found = dict[str, Tensor]()

        class Keeping(LayerVisitor):
            def on_batch_end(self, batch: int, output: Any) -> None:
                found[str(batch)] = output.logits.float().cpu()

        Pass(model, parts, to_end=True).run(Keeping())
        gathering = Gathering(model)
        ReversePass(model, parts).run(loss, gathering)
        return found | {key: value.cpu() for key, value in gathering.found.items() if value is not None}

    on_both(measure)


@pytest.mark.parametrize("strategy", ["count-guided", "hc-smoe", "auto"])
def test_plans_and_corrected_weights(strategy: str, tmp_path: Path, hasty: None) -> None:
    small.save(tmp_path / "model")
    text, groups = small.text_file(tmp_path), dict[str, Any]()

    def measure(device: str) -> dict[str, Tensor]:
        out = tmp_path / device
        compressor.compress(
            str(tmp_path / "model"), out, experts=4, strategy=strategy, correct="tune", calibration=str(text),
            samples=8, sequence_length=32, dtype="float32", device=device,
        )  # fmt: skip
        plan = pruned(json.loads((out / "compression.json").read_text())["plan"])
        groups[device] = [layer["groups"] for layer in plan["layers"]]
        return load_file(out / "model.safetensors")

    on_both(measure)
    members = {device: [[g["members"] for g in layer] for layer in found] for device, found in groups.items()}
    assert members["cuda"] == members["cpu"]


def test_answers(tmp_path: Path) -> None:
    small.save(tmp_path / "model")
    prompts = [Prompt.of(text) for text in ("one", "one two three", "four words and more")]

    def written(device: str, temperature: float) -> set[Answer]:
        writer = StockModel(locate(str(tmp_path / "model")), device, "float32")
        options = GenerationOptions(max_new_tokens=12, temperature=temperature)
        return {answer for _, answer in writer.complete([(prompt, 0) for prompt in prompts], options, Silent())}

    for temperature in (0.0, 1.0):
        assert written("cuda", temperature) == written("cpu", temperature)


def test_attribution(tmp_path: Path) -> None:
    small.save(tmp_path / "model")
    text = small.text_file(tmp_path)

    def measure(device: str) -> dict[str, Tensor]:
        found = compressor.attribute(
            str(tmp_path / "model"),
            calibration=TextOptions(data=(str(text),), samples=4, sequence_length=32),
            dtype="float32",
            device=device,
        )
        rows = {sender.name: [value or 0.0 for value in sender.influence] for sender in found.senders}
        return {name: torch.tensor(values) for name, values in rows.items()}

    on_both(measure)


def test_one_layer_and_its_successor_are_on_the_device(tmp_path: Path) -> None:
    small.save(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    model = open_model(locate(str(tmp_path)), "float32", "cuda")
    layer_names = model.architecture.decoder_layers
    keys = {decoder_layer: model.partial.keys_under(decoder_layer) for decoder_layer in layer_names}
    layer = max(sum(model.partial.empty[key].nbytes for key in keys[decoder_layer]) for decoder_layer in layer_names)
    held = list[int]()

    class Watching(LayerVisitor):
        def on_layer_end(self, decoder_layer: str) -> None:
            held.append(torch.cuda.memory_allocated())

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    Pass(model, [torch.ones(1, 8, dtype=torch.long)]).run(Watching())
    assert max(held) - before < 2.2 * layer + 2**22
