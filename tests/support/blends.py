"""Small data sets of the layouts of the default blend: folders, files and columns as on the Hub; test support."""

import json
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset

from compressor.data.sources import SourceSpec, read_blend

TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "look", "arguments": {"key": 7}}


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, contents, strict=False)]


def rows(name: str, number: int) -> dict[str, Any]:
    """Row `number` of the data set of this name, without its owner."""
    asked, answer = f"question {number} of {name}", f"answer {number * 7}"
    return {
        "fineweb-edu": {"text": f"prose {number} says {number * 7}", "id": "-", "dump": "d", "url": "u", "score": 4.5},
        "Magicoder-Evol-Instruct-110K": {"instruction": asked, "response": answer},
        "NuminaMath-CoT": {"source": "s", "problem": "p", "solution": "s", "messages": chat(asked, answer)},
        "ultrachat_200k": {"prompt": "p", "prompt_id": "i", "messages": chat(asked, answer, "and?", "no")},
        "aya_dataset": {"inputs": asked, "targets": answer, "language": "Yoruba", "user_id": "u"},
        "Synth-APIGen-v0.1": {
            "func_name": "look", "tools": json.dumps([TOOL]), "query": asked, "answers": json.dumps([CALL]),
        },
    }[name]  # fmt: skip


FILES = {
    "fineweb-edu": "sample/10BT/000_00000.parquet",
    "Magicoder-Evol-Instruct-110K": "data-evol_instruct-decontaminated.jsonl",
    "ultrachat_200k": "data/train_sft-00000-of-00001-a3ecf92756993583.parquet",
}
CONFIGS = {
    "fineweb-edu": [{"config_name": "sample-10BT", "data_files": [{"split": "train", "path": "sample/10BT/*"}]}],
    "aya_dataset": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}],
}


def data_sets(folder: Path, count: int = 40) -> dict[str, Path]:
    """A folder for each data set of the blend, by its id."""
    folders = dict[str, Path]()
    for entry in read_blend():
        source = SourceSpec.parse(entry.source).name
        name = source.partition("/")[2]
        path = folder / name / FILES.get(name, "data/train-00000-of-00001.parquet")
        path.parent.mkdir(parents=True)
        content = Dataset.from_list([rows(name, number) for number in range(count)])
        content.to_json(path) if path.suffix == ".jsonl" else content.to_parquet(path)
        if name in CONFIGS:
            (folder / name / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': CONFIGS[name]})}---\n")
        folders[source] = folder / name
    return folders


def local_blend(folder: Path, missing: str = "no set") -> Path:
    """A copy of the default blend whose data sets are folders; the folder of `missing` is not there."""
    folders = data_sets(folder / "sets")
    entries = list[dict[str, Any]]()
    for entry in read_blend():
        address = SourceSpec.parse(entry.source)
        name = folder / "gone" if missing in address.name else folders[address.name]
        source = f"{name}{entry.source.removeprefix(address.name)}"
        entries.append({**entry.model_dump(), "source": source})
    path = folder / "my-blend.yaml"
    path.write_text(yaml.safe_dump(entries))
    return path
