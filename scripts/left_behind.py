"""What a command has left behind, and how that differs from what another run of it left; for `kill_tests.py`."""

import json
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

NOT_COMPARED = ("seconds", "peak_memory", "finished")  # of a run's record: durations, bytes of memory, a date
NOT_COMPARED_OF_GATES = ("seconds", "reused_base")  # and the times of change of the weights that were judged


@dataclass(frozen=True, slots=True)
class Content:
    """What a folder holds: SHA-256 of every file by its path, and every folder."""

    files: dict[str, str]
    folders: frozenset[str]

    @classmethod
    def of(cls, folder: Path) -> "Content":
        """The content of `folder`, which is empty where there is none; links count as what they name."""
        files, folders = {}, set()
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink():
                files[name] = f"link to {os.readlink(path)}"
            elif path.is_dir():
                folders.add(name)
            else:
                raw = path.read_bytes()
                files[name] = sha256(_without_times(raw) if path.name == "gate.json" else raw).hexdigest()
        return cls(files, frozenset(folders))


def _without_times(gate: bytes) -> bytes:
    """gate.json without the fields that no two runs share; as it is where it is not whole."""
    try:
        content = {name: value for name, value in json.loads(gate).items() if name not in NOT_COMPARED_OF_GATES}
        for identity in (content["base_identity"], content["compressed_identity"]):
            identity["weights"] = [entry[:2] for entry in identity["weights"]]  # name and size
    except (ValueError, KeyError, TypeError, AttributeError):
        return gate
    return json.dumps(content).encode()


def differences(expected: Content, found: Content) -> tuple[list[str], list[str]]:
    """What differs or is missing, and what is there beside; names of files and folders."""
    changed = [name for name, digest in expected.files.items() if found.files.get(name) != digest]
    missing = sorted(expected.folders - found.folders)
    beside = sorted({*found.files, *found.folders} - {*expected.files, *expected.folders})
    return changed + missing, beside


def run_records(home: Path) -> dict[str, dict[str, Any]]:
    """What is kept of each run, by the digest of its output, without `home` and the fields that no two runs share."""
    found = {}
    for path in sorted((home / "home" / "cache" / "runs").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8").replace(str(home), ""))
        found[path.stem] = {name: value for name, value in content.items() if name not in NOT_COMPARED}
    return found
