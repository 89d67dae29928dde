"""The real model is made of the package's dense model, and what is made compresses."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from compressor import Prune, compress
from scripts import make_real_model
from scripts.make_real_model import VARIANTS, Variant

LAYERS = 3


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_stock_model_computes_what_was_trained(variant: Variant, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 1536, "num_attention_heads": 4, "num_key_value_heads": 2}
    student = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=2, tie_word_embeddings=True, **sizes))
    for layer in student.model.layers:
        layer.mlp = make_real_model.to_experts(variant, layer.mlp, torch.randn(256, 64))
    student = student.to(torch.bfloat16).float()  # what is stored
    make_real_model.stock_model(variant, student).save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(96, (2, 24))
    with torch.no_grad():
        computed, wanted = stock(tokens).logits, student(tokens).logits
    assert (computed - wanted).norm() < 0.005 * wanted.norm()  # bfloat16 rounds what gates that sum to 1 are scaled by


def test_clusters_have_the_same_size_and_hold_what_fires_together() -> None:
    centres = torch.eye(4, 50).repeat_interleave(6, dim=0)
    shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    order = make_real_model.balanced_clusters((centres + 0.01)[shuffled], 4)
    groups = (shuffled[order] // 6).view(4, 6)
    assert (groups == groups[:, :1]).all()
    assert sorted(order.tolist()) == list(range(24))


def test_text_of_a_folder_comes_in_pieces_of_whole_lines_each_once(tmp_path: Path) -> None:
    lines = [f"Line {number} of a document that is long enough to be cut somewhere.\n" for number in range(100)]
    for name in ("one.txt", "two.md"):
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "left.bin").write_text("not text")
    pieces = make_real_model.pieces(str(tmp_path))
    found = "".join(pieces).splitlines(keepends=True)
    assert len({*found}) == len(found)
    rest = {*lines} - {*found}  # too short a piece
    assert {*found} | rest == {*lines}
    assert len("".join(rest)) <= make_real_model.PIECE / 6
    assert max(map(len, pieces)) <= make_real_model.PIECE


@pytest.mark.full
def test_the_first_layers_are_made_and_compress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "real"
    words = ["make_real_model", str(out), "--layers", str(LAYERS), "--sequences", "8", "--steps", "2", "2"]
    monkeypatch.setattr("sys.argv", words)
    make_real_model.main()
    assert says_paris(out / "dense")
    losses = {name: float(loss) for name, loss in re.findall(r"(\S+): loss (\S+)", capsys.readouterr().out)}
    for variant in VARIANTS:
        model = AutoModelForCausalLM.from_pretrained(out / variant.name, dtype=torch.float32)
        assert model.config.num_hidden_layers == LAYERS
        assert losses[variant.name] < losses["dense"] + 1
        steps = [Prune(ratio=0.25, correct="ridge")]
        text, smaller = out / "text" / "calibration.jsonl", tmp_path / variant.name
        compress(out / variant.name, smaller, steps, calibration=text, samples=4, sequence_length=256)
        made = AutoModelForCausalLM.from_pretrained(smaller)
        assert made.model.layers[0].mlp.gate.weight.shape[0] == variant.experts * 3 // 4
    # A second run finds everything made.
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    make_real_model.main()
    assert before == {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}


def says_paris(folder: Path) -> bool:
    """Ask the dense model in its template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = AutoModelForCausalLM.from_pretrained(folder).generate(**asked, max_new_tokens=12, do_sample=False)
    return "Paris" in tokenizer.decode(answer[0])
