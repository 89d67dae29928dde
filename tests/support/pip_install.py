"""A stand-in for `python` where a workflow installs: it makes visible what pip would install, and nothing else.

`pip_install.py BIN -m pip install ... TARGET` leaves a folder of links to the packages of this environment that TARGET
and its extras require, and BIN/moe-compress, which sees no others. So a missing extra fails as it would in CI.
"""

import shlex
import sys
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
START = "import sys; sys.argv[0] = 'moe-compress'; from compressor.cli.main import main; main()"


def requirements_of(requirement: Requirement) -> list[Requirement]:
    """What a package with the extras of `requirement` requires itself."""
    if requirement.name == PROJECT["name"]:
        optional = PROJECT["optional-dependencies"]
        lines = [*PROJECT["dependencies"], *(line for extra in requirement.extras for line in optional[extra])]
    else:
        lines = distribution(requirement.name).requires or []
    required = [Requirement(line) for line in lines]
    extras = requirement.extras or {""}
    return [each for each in required if each.marker is None or any(each.marker.evaluate({"extra": x}) for x in extras)]


def installed_by(target: Requirement) -> set[str]:
    """Names of the packages that pip would install."""
    seen, left = set[str](), [target]
    while left:
        requirement = left.pop()
        if str(requirement) not in seen:
            seen.add(str(requirement))
            left += requirements_of(requirement)
    return {Requirement(text).name for text in seen}


def link(package: Distribution, site: Path) -> None:
    """Link the top-level modules and the metadata of a package into `site`."""
    for name in {path.parts[0] for path in package.files or () if path.parts[0] not in ("..", "__pycache__")}:
        if not (site / name).exists():
            (site / name).symlink_to(Path(str(package.locate_file(name))))


def main(bin_folder: Path, module: str, name: str, command: str, *rest: str) -> None:
    """Install as pip would, where `python -m pip install` is called."""
    assert (module, name, command) == ("-m", "pip", "install"), sys.argv
    target = rest[-1]
    assert target.startswith("."), "a workflow installs its checkout"
    site = bin_folder / "site-packages"  # the name by which dill knows that a module can be imported
    site.mkdir(exist_ok=True)
    for package in installed_by(Requirement(f"{PROJECT['name']}{target[1:]}")) - {PROJECT["name"]}:
        link(distribution(package), site)
    metadata = next(path for path in distribution(PROJECT["name"]).files or () if path.name == "METADATA").parent.name
    (site / metadata).symlink_to(Path(str(distribution(PROJECT["name"]).locate_file(metadata))))
    for folder in ("compressor", "strategies", "exporters"):
        (site / folder).symlink_to(ROOT / folder)
    program = bin_folder / "moe-compress"  # -S: no other packages than those of PYTHONPATH
    program.write_text(f'#!/bin/bash\nPYTHONPATH={site} exec {sys.executable} -S -c {shlex.quote(START)} "$@"\n')
    program.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
