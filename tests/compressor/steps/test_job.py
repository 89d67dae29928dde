"""Which files of a source travel with the weights."""

from pathlib import Path

from compressor.steps.job import carried_files

TRAVEL = ("generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE", "spiece.model", "vocab.txt")
STAY = (
    "config.json", "compression.json", "gate.json", "onnx_export.json", "README.md", "modeling_own.py",
    ".gitattributes", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "model.onnx",
)  # fmt: skip


def test_what_a_loader_needs_travels_and_what_speaks_of_the_source_stays(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "onnx").mkdir()
    for name in (*TRAVEL, *STAY, "additional_chat_templates/rag.jinja", "onnx/model.onnx"):
        (tmp_path / name).write_text(name)
    found = carried_files(tmp_path)
    assert set(found) == {*TRAVEL, "additional_chat_templates/rag.jinja"}
    assert all(path.read_text() == name for name, path in found.items())
