"""Links among a checkpoint's files: within the folder and into the Hub's own cache they are read, out of it never."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from compressor.checkpoint.reader import Checkpoint, refuse_link
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.steps.job import carried_files
from tests.support import small

OUTSIDE = "is a link to a file outside the folder"
HIDDEN = "is a link to a hidden file"
READERS: dict[str, Callable[[Path], object]] = {
    "locate": lambda folder: locate(str(folder)),
    "open": Checkpoint,
    "carry": carried_files,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    small.save(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "passwd").write_text("root:x:0:0")
    return Path(shutil.copytree(saved, tmp_path / "model"))


def link(folder: Path, name: str, target: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)


LINKS = {
    "vocab.txt": "../outside/passwd",
    "tokenizer.json": "/etc/passwd",
    "config.json": "../outside/passwd",
    "model.safetensors": "../outside/passwd",
    "LICENSE": "/nowhere/at/all",  # it may be there when the folder is opened again
    "additional_chat_templates": "../outside",
    "additional_chat_templates/tools.jinja": "../../outside/passwd",
    "merges.txt": "../model-other/../outside/passwd",
    "added_tokens.json": "../modelling.json",  # a folder whose name only begins alike
}


@pytest.mark.parametrize("how", READERS)
@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_the_folder_is_refused_by_name(folder: Path, name: str, how: str) -> None:
    link(folder, name, LINKS[name])
    with pytest.raises(CompressionError, match=OUTSIDE) as caught:
        READERS[how](folder)
    assert str(folder / name) in str(caught.value) and "\n" not in str(caught.value)


def test_links_within_the_folder_and_from_the_folder_itself_are_read(folder: Path, tmp_path: Path) -> None:
    (folder / "weights").mkdir()
    shutil.move(folder / "model.safetensors", folder / "weights" / "all")
    link(folder, "model.safetensors", "weights/all")
    link(folder, "NOTICE", "config.json")
    link(folder, "runs", "../outside")  # no file of the checkpoint
    link(folder, ".env", "../outside/passwd")  # neither read nor carried
    link(folder, "ring", "ring")
    (tmp_path / "alias").symlink_to("model")
    found = locate(str(tmp_path / "alias")).folder
    assert Checkpoint(found).tensors == Checkpoint(tmp_path / "alias").tensors
    assert carried_files(tmp_path / "alias").keys() == {*carried_files(folder)} and "NOTICE" in carried_files(folder)


def cached(folder: Path, cache: Path) -> Path:
    """The model as the Hub's client keeps it: links from the commit's folder to files named by their content."""
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "c0"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, cache / "blobs" / f"{number:064}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064}")
    return snapshot


def test_the_hubs_cache_keeps_its_files_elsewhere(folder: Path, tmp_path: Path) -> None:
    snapshot = cached(folder, tmp_path / "models--org--one")
    assert locate(str(snapshot)).folder == snapshot
    assert carried_files(snapshot).keys() == carried_files(folder).keys()
    assert Checkpoint(snapshot).tensors == Checkpoint(folder).tensors
    link(snapshot, "vocab.txt", "../../../outside/passwd")
    with pytest.raises(CompressionError, match=OUTSIDE):
        Checkpoint(snapshot)


def test_the_blobs_of_another_model_or_another_folder_are_outside(folder: Path, tmp_path: Path) -> None:
    snapshot, other = (cached(folder, tmp_path / name) for name in ("models--org--one", "models--org--two"))
    link(snapshot, "config.json", f"{other}/config.json")
    with pytest.raises(CompressionError, match=OUTSIDE):
        Checkpoint(snapshot)
    blobs = tmp_path / "models--org--two" / "blobs"
    blobs.rename(tmp_path / "moved")
    blobs.symlink_to(tmp_path / "moved")  # which could as well be any other folder
    with pytest.raises(CompressionError, match=OUTSIDE):
        refuse_link(other / "config.json", other)


def test_hidden_files_are_not_carried(folder: Path) -> None:
    before = carried_files(folder)
    for name in (".netrc", ".env", ".npmrc", ".git-credentials", ".hidden.json", "additional_chat_templates/.netrc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("machine example.org login me password secret")
    assert carried_files(folder) == before


@pytest.mark.parametrize("target", [".netrc", ".git/annex/netrc", "link"])
@pytest.mark.parametrize("how", READERS)
def test_a_link_to_a_hidden_file_is_refused_by_name(folder: Path, how: str, target: str) -> None:
    (folder / ".git" / "annex").mkdir(parents=True)
    for name in (".netrc", ".git/annex/netrc"):
        (folder / name).write_text("machine example.org login me password secret")
    link(folder, "link", ".netrc" if target == "link" else "config.json")
    link(folder, "notes.txt", target)
    with pytest.raises(CompressionError, match=f"(notes.txt|link) {HIDDEN}"):
        READERS[how](folder)


def test_a_hidden_folder_above_the_checkpoint_hides_nothing(folder: Path) -> None:
    above = folder.parent / ".cache" / "model"
    shutil.copytree(folder, above)
    link(above, "NOTICE", "config.json")
    assert "NOTICE" in carried_files(above)
