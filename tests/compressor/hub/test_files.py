import shutil
from pathlib import Path

import pytest

from compressor.hub.push import push
from compressor.quality_gate.report import gate_json
from tests.support.hub import Hub
from tests.support.hub_pushes import CARD, REPOSITORY, content, gate_of, refusal, shards


def test_what_does_not_belong_stays_here(folder: Path, hub: Hub) -> None:
    (folder / "SHA256SUMS").unlink()  # which would have to list what loaders read
    before = set(content(folder))
    litter = (
        ".env", ".git/config", ".cache/huggingface/x.json", "model.lock", "__pycache__/a.pyc", "optimizer.pt",
        "model-old.safetensors", "modeling_own.py", "CHANGES.md", "pytorch_model.bin.index.json", "logs/run.json",
        "unseen.png", "model.onnx", ".hidden.json", "LICENSE.lock",
    )  # fmt: skip
    for name in litter:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    belonging = {"vocab.txt": b"a", "additional_chat_templates/tools.jinja": b"{{ x }}", "NOTICE": b"n"}
    for name, data in belonging.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "linked.json").symlink_to("config.json")  # within the folder
    summary = push(folder, REPOSITORY)
    assert set(hub.repositories[REPOSITORY].files()) == {
        *before, *CARD, *belonging, "linked.json", ".gitattributes",
    }  # fmt: skip
    assert set(summary.left_out) == {name.split("/")[0] + "/" * ("/" in name) for name in litter if name[0] != "."}


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "extra.json", "additional_chat_templates", "README.md", "onnx", "a shard"]
)
def test_a_link_out_of_the_folder_is_refused_by_name(folder: Path, hub: Hub, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "inner.jinja").write_text("secret")
    target = outside if name in ("additional_chat_templates", "onnx") else outside / "inner.jinja"
    name = shards(folder)[0].name if name == "a shard" else name
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)
    assert name in refusal(folder, hub, "link to a file outside the folder")


def test_a_model_in_the_hubs_cache_is_pushed(folder: Path, hub: Hub, tmp_path: Path) -> None:
    """There its files are links to the repository's own blobs."""
    snapshot, blobs = tmp_path / "models--org--one" / "snapshots" / "c0", tmp_path / "models--org--one" / "blobs"
    shutil.copytree(folder, snapshot)
    blobs.mkdir()
    for path in snapshot.iterdir():
        path.rename(blobs / f"digest-{path.name}")
        path.symlink_to(f"../../blobs/digest-{path.name}")
    push(snapshot, REPOSITORY)
    assert set(hub.repositories[REPOSITORY].files()) == {*content(folder), *CARD, ".gitattributes"}


def test_a_link_that_leads_nowhere_is_refused(folder: Path, hub: Hub) -> None:
    (folder / "vocab.json").symlink_to("gone.json")
    assert "vocab.json" in refusal(folder, hub, "leads nowhere")


def test_a_card_of_ones_own_is_kept(folder: Path, hub: Hub) -> None:
    card = (
        b"---\nlicense: mit\n---\n# Mine\n![one](plots/one.png) <img src='./two.JPG' width=3> ![no](missing.png)\n"
        b"![far](https://host/three.png) ![up](../up.png) ![hidden](.cache/x.png) [doc](paper.pdf)\n"
    )
    (folder / "README.md").write_bytes(card)
    for name in ("plots/one.png", "two.JPG", "../up.png", ".cache/x.png", "paper.pdf", "plots/two.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x89PNG")
    push(folder, REPOSITORY)
    there = hub.repositories[REPOSITORY].files()
    assert there["README.md"] == card
    assert {name for name in there if name.lower().endswith((".png", ".jpg", ".pdf"))} == {"plots/one.png", "two.JPG"}


def test_parts_of_an_earlier_model_go_in_the_same_commit(made: Path, hub: Hub) -> None:
    """A model.safetensors left there would be loaded in place of the shards."""
    earlier = {
        "model.safetensors": b"old", "model-00001-of-00099.safetensors": b"old", "gate.json": b"{}",
        "onnx/model.onnx": b"old", "onnx/onnx_export.json": b"{}",
    }  # fmt: skip
    others = {"adapter_model.safetensors": b"x", "notes.txt": b"x", "plots/model.safetensors": b"x"}
    hub.create(REPOSITORY, {**earlier, **others})
    planned = push(made, REPOSITORY, dry_run=True)
    assert set(hub.repositories[REPOSITORY].files()) == {*earlier, *others}
    summary = push(made, REPOSITORY)
    assert set(summary.removed) == set(planned.removed) == set(earlier)
    assert set(hub.repositories[REPOSITORY].files()) == {*content(made), *CARD, *others}
    assert len(hub.repositories[REPOSITORY].commits()) == 2


def test_reports_stay_with_the_weights_that_they_are_about(folder: Path, hub: Hub) -> None:
    (folder / "gate.json").write_text(gate_json(gate_of(folder)))
    (folder / "README.md").write_text("---\ntags: [moe-compressor]\n---\n")
    push(folder, REPOSITORY)
    (folder / "gate.json").unlink()
    assert push(folder, REPOSITORY).removed == ()
    assert "gate.json" in hub.repositories[REPOSITORY].files()
