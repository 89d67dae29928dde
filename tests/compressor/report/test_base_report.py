"""The report of a model before compression, against NumPy on the outputs of the stock experts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from compressor.checkpoint.source import locate
from compressor.data.batches import calibrate
from compressor.data.sources import parse_sources
from compressor.model.opened import open_model
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Silent
from compressor.recipe.plan import LayerPlan
from compressor.report.base_report import MEASURES, compare_experts
from tests.support import small
from tests.support.command_line import Run
from tests.support.opened_models import one_expert, plain_calls


def labels_of(plan: LayerPlan) -> list[int]:
    """The number of each expert's group."""
    return [next(n for n, group in enumerate(plan.groups) if expert in group.members) for expert in range(8)]


def cka(outputs: Any) -> Any:
    """Linear CKA of experts' outputs [E, T, H]."""
    grams = [(x - x.mean(0)) @ (x - x.mean(0)).T for x in outputs]
    products = np.array([[(a * b).sum() for a in grams] for b in grams])
    return products / np.sqrt(np.outer(products.diagonal(), products.diagonal()))


def silhouette(distances: Any, labels: list[int]) -> float:
    """The mean over experts of (b - a) / max(a, b); 0 for one that is alone."""
    scores = []
    for expert, label in enumerate(labels):
        means = {}
        for group in set(labels):
            others = [other for other in range(len(labels)) if labels[other] == group and other != expert]
            means[group] = distances[expert, others].mean() if others else None
        own = means.pop(label)
        nearest = min(value for value in means.values() if value is not None)
        scores.append(0.0 if own is None else (nearest - own) / max(own, nearest))
    return float(np.mean(scores))


def test_similarity_groups_and_map_are_those_of_the_stock_experts(tmp_path: Path) -> None:
    folder, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    data = compare_experts(str(folder), None, [str(text)], 8, 16, 5, Silent(), "cpu", "float32")
    model = open_model(locate(str(folder)), "float32", "cpu")
    sources = parse_sources([str(text)])
    read = calibrate(sources, load_tokenizer(folder), samples=8, length=16, seed=0, vocab=model.vocabulary)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert (data.tokens, data.groups, len(data.layers)) == (128, 5, len(model.architecture.layers))
    called = plain_calls(stock, model.architecture, read.batches)
    for number, (name, calls) in enumerate(called.items()):
        hidden, experts = calls.joined()[0], stock.get_submodule(name)
        kernel = cka([one_expert(experts, expert, hidden).double().numpy() for expert in range(8)])
        report, expert_map = data.layers[number], data.maps[number]
        assert report.module == name and len(report.plan.groups) == 5
        np.testing.assert_allclose(report.similarity, kernel, atol=2e-4)
        for measure, reports in data.measures.items():
            expected = silhouette(1 - np.array(reports[number].similarity), labels_of(reports[number].plan))
            assert data.silhouettes[measure][number] == pytest.approx(expected, abs=1e-5)
        middle = np.eye(8) - 1 / 8
        values, vectors = np.linalg.eigh(middle @ kernel @ middle)
        places, plane = np.array(expert_map.places), vectors[:, -2:] * np.sqrt(values[-2:])
        np.testing.assert_allclose(places @ places.T, plane @ plane.T, atol=2e-3)
        assert expert_map.share == pytest.approx(values[-2:].sum() / values.sum(), abs=1e-3)


@pytest.mark.full
def test_the_page_of_a_model_that_is_not_compressed(tmp_path: Path, run: Run) -> None:
    folder, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    asked = ("report", folder, "--calibration", text, "--samples", 4, "--sequence-length", 16)
    done = run(*asked, "-o", tmp_path / "page.html", "--figures", tmp_path / "figures", "--json")
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert set(told["measures"]) == set(MEASURES) and len(told["maps"][0]["places"]) == 8
    assert {path.stem for path in (tmp_path / "figures").iterdir()} >= {"depth", "map", "linear-cka", "rbf-cka"}
    assert "Redundancy over depth" in (tmp_path / "page.html").read_text(encoding="utf-8")
    again = run(*asked, "-o", tmp_path / "page.html")
    assert again.status == 2 and "exists already" in again.err
