"""The template of a step in docs/plugins.md, in a package of its own, runs by name in a recipe on the demo model."""

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import compressor
from tests.command_line import Run
from tests.pages import DOCS, ROOT

DEMO = ROOT / "compressor" / "demo" / "checkpoint"
PACKAGE = "their_scale"
TEXT = (DOCS / "plugins.md").read_text(encoding="utf-8")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install` would leave of the template: the package, and the metadata with its entry point."""
    source = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))[
        "moe_loudest/scale.py"
    ]
    value = re.findall(r'^scale = "moe_loudest\.(scale:\w+)"$', TEXT, re.MULTILINE)[0]
    package, info = tmp_path / PACKAGE, tmp_path / f"{PACKAGE}-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "scale.py").write_text(source, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[moe_compressor.steps]\nscale = {PACKAGE}.{value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("installed")
def test_the_template_scales_the_experts_of_the_demo_model(tmp_path: Path, run: Run) -> None:
    steps = [{"prune": {"strategy": "model-centric", "experts": 12}}, {"scale": {"factor": 0.5}}]
    for name, chosen in (("pruned", steps[:1]), ("scaled", steps)):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump({"model": str(DEMO), "steps": chosen}))
        made = run("compress", recipe, "-o", tmp_path / name)
        assert made.status == 0, made.err
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("pruned", "scaled"))
    assert set(before) == set(after)
    experts = {name for name in before if "experts" in name and "down_proj" in name}
    assert experts
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor * 0.5 if name in experts else tensor), name
    repeated = run("compress", tmp_path / "scaled" / "recipe.yaml", "-o", tmp_path / "again")
    assert repeated.status == 0, repeated.err
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "scaled" / "model.safetensors"
    ).read_bytes()


@pytest.mark.usefixtures("installed")
def test_the_template_is_listed_and_its_options_are_checked(tmp_path: Path, run: Run) -> None:
    listed = run("steps").out
    assert "scale" in listed and "Multiply each expert's down projection" in " ".join(listed.split())
    for option, message in (("fator=0.5", r"has no option 'fator'; did you mean 'factor'\?"), ("factor=0", "factor")):
        refused = run("compress", DEMO, "-o", tmp_path / "out", "--experts", 12, "--set", f"scale.{option}")
        assert refused.status == 2 and re.search(message, refused.err), refused.err
    with pytest.raises(compressor.CompressionError, match=r"no step 'scall' at steps\[0\]; did you mean 'scale'"):
        compressor.Recipe.of({"model": str(DEMO), "steps": ["scall"]})
