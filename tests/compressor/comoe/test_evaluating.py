import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from compressor.answers.items import Item, rows_of
from compressor.comoe.evaluating import (
    SAMPLED,
    ComoeEvaluation,
    ExpertUse,
    Representations,
    TaskResult,
    evaluate,
    project,
)
from compressor.comoe.layer import comoe_layers, inject
from compressor.comoe.report import NAMES, write_evaluation
from tests.support import small
from tests.support.command_line import names
from tests.support.tuning_setups import CONFIG, dense, questions


def tuned() -> Any:
    model = inject(dense(), CONFIG)
    generator = torch.Generator().manual_seed(5)
    for layer in comoe_layers(model).values():
        layer.up.data.normal_(0, 0.3, generator=generator)
    return model


def likelihood(model: Any, prompt: str, answer: str) -> float:
    (row,) = rows_of(Item(prompt, answer), small.tokenizer(), small.VOCABULARY)
    with torch.no_grad():
        logits = model(torch.tensor([row.tokens])).logits[0]
    scores = logits.log_softmax(-1)
    return sum(float(scores[place - 1, row.tokens[place]]) for place in range(row.start, len(row.tokens)))


def test_scores_are_those_of_a_row_at_a_time() -> None:
    model, items = tuned(), questions(7)
    found = {each.task: each for each in evaluate(model, small.tokenizer(), items, batch_size=3)}
    choices = [item for item in items if item.choices]
    right = sum(
        max(item.choices, key=lambda choice: likelihood(model, item.prompt, choice)) == item.answer for item in choices
    )
    assert (found["digits"].items, found["digits"].right) == (7, right)
    letters = [item for item in items if item.task == "letters"]
    nats = -sum(likelihood(model, item.prompt, item.answer) for item in letters)
    assert found["letters"].loss == pytest.approx(nats / (2 * 7), rel=1e-4)  # a blank and a letter


def test_an_answer_without_choices_must_be_what_the_model_writes() -> None:
    model, tokenizer = tuned(), small.tokenizer()
    letters = [tokenizer.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"]
    others = [token for token in range(small.VOCABULARY) if token not in letters]
    model.lm_head.weight.data[others] = 0  # so that it goes on with a letter
    with torch.no_grad():
        written = tokenizer.decode(int(model(torch.tensor([tokenizer.encode("after a comes")])).logits[0, -1].argmax()))
    assert written.isalpha()
    items = [Item("after a comes", written, task="its own"), Item("after a comes", written.upper(), task="other")]
    assert [each.right for each in evaluate(model, tokenizer, items)] == [1, 0]


def test_workload_and_similarity_are_counted_over_the_tokens_of_right_answers() -> None:
    model, items = tuned(), [item for item in questions(5) if item.task == "digits"]
    (found,) = evaluate(model, small.tokenizer(), items, batch_size=2)
    layers = comoe_layers(model)
    counts = {name: torch.zeros(CONFIG.experts) for name in layers}
    cosines, tokens = torch.zeros(CONFIG.experts, CONFIG.experts, dtype=torch.float64), 0
    inputs: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0][0]}))
    for item in items:
        (row,) = rows_of(Item(item.prompt, item.answer), small.tokenizer(), small.VOCABULARY)
        with torch.no_grad():
            model(torch.tensor([row.tokens]))
            for name, layer in layers.items():
                for token in inputs[name]:
                    counts[name][layer.gates(token[None])[1][0]] += 1
                    answers = [layer.up[expert] @ layer.down[expert] @ token for expert in range(CONFIG.experts)]
                    for one, a in enumerate(answers):
                        for other, b in enumerate(answers):
                            cosines[one, other] += float(functional.cosine_similarity(a, b, dim=0))
        tokens += len(row.tokens) * len(layers)
    shares = torch.stack([each / each.sum() for each in counts.values()])
    torch.testing.assert_close(torch.tensor(found.workload), shares)
    torch.testing.assert_close(torch.tensor(found.similarity, dtype=torch.float64), cosines / tokens, atol=1e-5, rtol=0)
    assert sum(found.shares) == pytest.approx(1)


def test_a_model_without_experts_has_scores_alone() -> None:
    found = evaluate(dense(), small.tokenizer(), questions(3))
    assert [each.task for each in found] == ["letters", "digits"]
    assert all(each.workload == each.similarity == () for each in found)


def test_a_sample_of_outputs_is_projected_and_grouped_by_expert() -> None:
    outputs = functional.normalize(torch.randn(300, 3, 6, generator=torch.Generator().manual_seed(3)), dim=-1)
    use = ExpertUse(1, 3, 0)
    for part in outputs.split(50):
        use.sample(part)
    found = use.outputs
    places = [int((outputs == row).all(-1).all(-1).nonzero()) for row in found]
    assert len(set(places)) == SAMPLED == len(found) and min(places) < 50 and max(places) >= 250
    shown = project(found, "pca")
    assert shown is not None
    rows = found.transpose(0, 1).reshape(-1, 6).double().numpy()
    centred = rows - rows.mean(0)
    expected = np.abs(centred @ np.linalg.svd(centred)[2][:2].T)
    np.testing.assert_allclose(np.abs(np.reshape(shown.points, (-1, 2))), expected, atol=1e-8)
    distances = np.linalg.norm(rows[:, None] - rows[None], axis=2).reshape(len(rows), 3, SAMPLED)
    widths = []
    for row, by_expert in enumerate(distances):
        own = row // SAMPLED
        inside = by_expert[own].sum() / (SAMPLED - 1)
        outside = min(by_expert[other].mean() for other in range(3) if other != own)
        widths.append((outside - inside) / max(outside, inside))
    assert shown.silhouette == pytest.approx(np.mean(widths))
    assert np.shape(project(found, "tsne").points) == (3, SAMPLED, 2)  # type: ignore[union-attr]
    assert project(torch.zeros_like(found), "pca") is project(found[:1], "pca") is None


def result(task: str) -> TaskResult:
    points = (((0.0, 1.0), (2.0, 3.0)), ((4.0, 1.0), (2.0, 5.0)), ((6.0, 1.0), (2.0, 7.0)))
    similarity = ((1, 0.5, 0), (0.5, 1, -0.5), (0, -0.5, 1))
    workload = ((0.5, 0.5, 0.0), (0.3, 0.3, 0.4))
    return TaskResult(task, 8, 4, 0.5, workload, similarity, Representations(points, 0.25))


def test_the_reports_are_whole_and_agree(tmp_path: Path) -> None:
    made = ComoeEvaluation(
        "tiny", "adapters", 3, 2, ("a", "b"), (result("one"), result("<two>")), (result("one"), result("<two>"))
    )
    written = write_evaluation(made, tmp_path / "out")
    assert names(tmp_path / "out") == sorted(NAMES) == sorted(path.name for path in written)
    text, page = ((tmp_path / "out" / name).read_text() for name in NAMES[1:3])
    assert "50.0%" in text and "workload.png" in text and "similarity.png" in text
    assert "&lt;two&gt;" in page and "<two>" not in page and page.count("<svg") == 6
    assert "2 tokens of 3 experts; silhouette 0.250." in text
    assert "40.0%, 40.0%, 20.0%" in text and page.count("Experts from 1 on") == 2
    assert "Mean cosine of different experts 0.000: 2 and 1 0.50, 3 and 1 0.00, 3 and 2 -0.50." in text
    content = json.loads((tmp_path / "out" / NAMES[0]).read_text())
    assert content["tasks"][0]["workload"] == [[0.5, 0.5, 0.0], [0.3, 0.3, 0.4]]
    assert all((tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG" for name in NAMES[3:])
