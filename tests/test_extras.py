"""Without the optional packages `compress` runs to the end; each command that needs one names its extra at once."""

import json
import os
import subprocess
import sys
import tomllib

import pytest

from compressor.extras import EXTRAS
from tests.support import gguf_models, quantized, small
from tests.support.doc_pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_REQUIRED = {*EXTRAS, "PIL", "markupsafe", "onnx_ir", "peft", "evaluate", "sentence_transformers"}
HIDDEN = f"""
import json, sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {NOT_REQUIRED!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
from compressor.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["moe-compress", *words]
    print("$", *words, file=sys.stderr)
    try:
        main()
    except SystemExit as end:
        print("torch" in sys.modules, end.code or 0, file=sys.stderr)
"""
COMPRESS = "compress model -o out --experts 4 --calibration calibration.txt --samples 4 --sequence-length 32"
RUNNING = ("--help", "--version", "list strategies", "list steps", "inspect model", f"{COMPRESS} --correct ridge")
LACKING = {
    "gate model out --tasks moe_demo": ("lm-eval", "eval"),
    f"{COMPRESS.replace('out', 'gated')} --gate moe_demo": ("lm-eval", "eval"),
    "reference model -o reference --tasks moe_demo": ("lm-eval", "eval"),
    "report out": ("matplotlib", "report"),
    "compare model --experts 4 --calibration calibration.txt": ("matplotlib", "report"),
    "attribute model --calibration calibration.txt -o attribution": ("matplotlib", "report"),
    f"{COMPRESS.replace('out', 'protected')} --protect graph:1": ("networkx", "report"),
    "comoe evaluate model --adapters adapters --heldout items.jsonl -o evaluation": ("matplotlib", "report"),
    "push out org/model --dry-run": ("matplotlib", "report"),
    f"{COMPRESS.replace('out', 'pushed')} --push-to-hub org/model": ("matplotlib", "report"),
    f"{COMPRESS.replace('out', 'packed-out')} --set quantize.scheme=int8": ("compressed-tensors", "quantized"),
    "comoe train model -o adapters --calibration items.jsonl": ("accelerate", "eval"),
    "export out -o graph": ("onnx", "onnx"),
    f"{COMPRESS.replace('out', 'both')} --format safetensors,onnx": ("onnx", "onnx"),
    "generate graph-only Hello": ("onnxruntime", "onnx"),
    "inspect model.gguf": ("gguf", "gguf"),
    "inspect packed": ("compressed-tensors", "quantized"),
}
WRONG = {  # refused before torch is loaded
    "compress model -o new --strategy raep": "did you mean 'reap'",
    "compress model -o new --set prnue.ratio=0.5": "did you mean 'prune'",
    "compress model -o new --set prune.ratoi=0.5": "did you mean 'ratio'",
    "compress model -o new --correct tuned": "'ridge' or 'tune'",
    "compress model -o new --format onxx": "did you mean 'onnx'",
    "compress model -o new --ratio 0.5 --calibration gone.jsonl": "gone.jsonl does not exist",
    "compress modle -o new --ratio 0.5": "modle is not a folder",
    "compress ./org/modle -o new --ratio 0.5": "modle is not a folder",
    "compress gone.yaml -o new": "gone.yaml is not a file",
    "plan model -o new --strategy raep": "did you mean 'reap'",
    "apply gone.json -o new": "gone.json cannot be read",
    "distill model --base gone -o new": "gone is not a folder",
    "distill model --base model -o new --train expert": "'experts'",
    "split gone -o new --parts 2": "gone is not a folder",
    "inspect gone": "gone is not a folder",
    "gate model gone --prompts demo": "gone is not a folder",
    "gate model model --prompts gone.jsonl": "gone.jsonl does not exist",
    "evaluate model gone --prompts demo": "gone is not a folder",
    "traces gone -o new.jsonl --prompts demo": "gone is not a folder",
    "check gone": "gone is not a folder",
    "export model -o new --format onxx": "did you mean 'onnx'",
    "push gone org/model": "gone cannot be read",
}
READING = ("inspect packed",)  # which learns from the checkpoint what it needs; no other has imported torch


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each command printed on stderr and its status, all run in one process without the optional packages."""
    folder = tmp_path_factory.mktemp("extras")
    small.text_file(small.save(folder / "model").parent)
    graph = small.save(folder / "graph-only")
    (graph / "model.safetensors").rename(graph / "model.onnx")
    gguf_models.quantised(folder / "model.gguf")
    quantized.save_compressed_tensors(folder / "packed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    told = dict[str, list[str]]()
    for commands in (RUNNING, LACKING, WRONG):  # the last processes have imported nothing yet
        words = json.dumps([command.split() for command in commands])
        done = subprocess.run(
            [sys.executable, "-c", HIDDEN, words],
            cwd=folder, env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        parts = [part.split("\n", 1) for part in done.stderr.removeprefix("$ ").split("\n$ ")]
        told |= {command: text.splitlines() for command, text in parts}
    assert (folder / "out" / "model.safetensors").is_file(), told
    new = ("gated", "protected", "both", "comparison", "pushed", "packed-out", "adapters")
    assert not [name for name in new if (folder / name).exists()]
    return told


@pytest.mark.full
@pytest.mark.parametrize("command", RUNNING)
def test_what_compressing_takes_is_enough(outcomes: dict[str, list[str]], command: str) -> None:
    assert outcomes[command][-1].split()[1] == "0", outcomes[command]


@pytest.mark.full
@pytest.mark.parametrize(("command", "lacking"), LACKING.items())
def test_a_command_that_lacks_a_package_names_its_extra(
    outcomes: dict[str, list[str]], command: str, lacking: tuple[str, str]
) -> None:
    package, extra = lacking
    message, ended = outcomes[command][-2:]
    assert message == f"Error: {package} is missing; pip install 'moe-compressor[{extra}]'"
    assert ended == f"{command in READING} 2"


@pytest.mark.full
@pytest.mark.parametrize(("command", "message"), WRONG.items())
def test_what_is_wrong_is_refused_before_torch_is_loaded(
    outcomes: dict[str, list[str]], command: str, message: str
) -> None:
    sentence, ended = outcomes[command]
    assert sentence.startswith("Error: ") and message in sentence
    assert ended == "False 2"


def test_extras_install_what_they_name() -> None:
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        required = " ".join(extras[extra]).replace("lm-eval[hf]", "lm-eval accelerate")
        assert package.replace("_", "-") in required
    assert extras["all"] == [f"moe-compressor[{','.join(dict.fromkeys(EXTRAS.values()))}]"]
