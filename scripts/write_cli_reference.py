"""Build the reference of commands and steps from the commands themselves, so that the page says what `--help` says.

`make docs` puts it into the site; python -m scripts.write_cli_reference prints it.
"""

import inspect
import json
from collections.abc import Iterable
from typing import Any

import typer

from compressor import Constants, Correct, Distill, Prune, Quantize, Routers
from compressor.cli import gate, measure
from compressor.cli.main import app
from compressor.cli.options import PANELS, with_all_options
from compressor.cli.settings import SHOWN, recipe_options
from compressor.options import OPTIONS

PAGE = "reference/command-line.md"  # in the site
WHOLE = {
    "gate": gate.gate,
    "compare": measure.compare,
}  # whose `--help` shows few options; recipes' are below
VALUES = {
    "int": "N",
    "float": "X",
    "path": "PATH",
    "str": "TEXT",
}  # how a value is shown, by its type
INTRODUCTION = """\
# Command line

Every command has `--help`, and those with many options `--help-all`, which say the same as this page. Tables and
progress go to the terminal; with `--json` a command prints JSON instead. Errors are one sentence on stderr.

| exit status | meaning |
|---|---|
| 0 | done; for `gate` and `compress --gate`: the model passes |
| 1 | `gate` and `compress --gate`: the model fails |
| 2 | the command was used wrongly, or could not do what was asked |
| 3 | `gate` and `compress --gate`: the items are too few to tell |
| 130 | interrupted; the same command goes on where it stopped |
"""

SHORTHANDS = """\
## Shorthands of compress

`compress` and `plan` take these options, too, which only `--help-all` shows. Each is short for the path
beside it: `--max-drop 0.02` is `--gate.max_drop 0.02`, or `--set gate.max_drop=0.02`. `--option NAME=VALUE` is `--set prune.options.NAME=VALUE`, an
option of the strategy, and `--no-merge-routers` is `--option merge_routers=false`. `--json` prints JSON, and
`--imatrix FILE` names the importance matrix by which experts of a GGUF file are chosen. `--bytes SIZE` of `compress`
[prunes or quantises](../how-to/prune-or-quantise.md) to a size, `--for SERVERS` in formats that these load.

| option | field |
|---|---|"""
STEPS_INTRODUCTION = """\
## Steps of a recipe

The built-in steps and their options, as a [recipe](../how-to/recipes.md) names them; on the command line
`--step.option value`, or `--set step.option=value`, sets any of them. `moe-compress list steps` lists these and those of [plugins](../plugins.md).
"""
STEPS = (Prune, Correct, Constants, Routers, Distill, Quantize)


def commands() -> dict[str, Any]:
    """The commands by name, in the order of the help; those of a group by both names."""
    group: Any = typer.main.get_command(app)
    found = dict[str, Any]()
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if name in WHOLE:
            command = with_all_options(WHOLE[name])
        inner = getattr(command, "commands", {})
        found |= (
            {f"{name} {other}": each for other, each in inner.items()} if inner else {name: command}
        )
    return found


def page() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION, *(_section(name, command) for name, command in commands().items())]
    rows = (
        f"| `--{option.name.replace('_', '-')}` | `{path}` |"
        for path, option in sorted(recipe_options())
        if option.name not in ("option", "no_merge_routers")
    )
    hidden = [row for row in rows if row.split("`")[1][2:].replace("-", "_") not in SHOWN]
    return "\n".join(
        [*parts, SHORTHANDS, *hidden, "", STEPS_INTRODUCTION, *map(_step_section, STEPS)]
    )


def _step_section(step: Any) -> str:
    """The options of a step: its fields."""
    rows = []
    for name, entry in step.model_fields.items():
        default = entry.get_default(call_default_factory=True)
        if isinstance(default, Correct):
            default = default.method
        shown = "" if default is None or default == {} else f" Default: `{json.dumps(default)}`."
        rows.append(f"| `{name}` | {_cell(entry.description or '')}{shown} |")
    text = (step.__doc__ or "").partition(OPTIONS)[0].strip()
    name = "correct, of prune and constants" if step is Correct else step.name
    return "\n".join(
        [f"### {name}", "", _cell(text), "", "| option | meaning |", "|---|---|", *rows, ""]
    )


def _section(name: str, command: Any) -> str:
    arguments = [entry for entry in command.params if entry.param_type_name == "argument"]
    options = [entry for entry in command.params if entry.param_type_name == "option"]
    usage = " ".join(["moe-compress", name, *(_placeholder(entry) for entry in arguments)])
    needed = "".join(f" {entry.opts[0]} {_value(entry)}" for entry in options if entry.required)
    lines = [
        f"## {name}",
        "",
        _cell(inspect.cleandoc(command.help or "")),
        "",
        "```text",
        f"{usage}{needed} [OPTIONS]",
    ]
    lines += ["```", ""]
    if arguments:
        lines += [
            *_table("argument", ((f"`{_placeholder(entry)}`", entry) for entry in arguments)),
            "",
        ]
    for panel in dict.fromkeys((None, *PANELS, *(entry.rich_help_panel for entry in options))):
        inside = [entry for entry in options if entry.rich_help_panel == panel and not entry.hidden]
        if inside:
            lines += [*_table(panel or "option", ((_spelt(entry), entry) for entry in inside)), ""]
    return "\n".join(lines)


def _table(title: str, entries: Iterable[tuple[str, Any]]) -> list[str]:
    return [
        f"| {title} | meaning |",
        "|---|---|",
        *(f"| {name} | {_help(entry)} |" for name, entry in entries),
    ]


def _placeholder(argument: Any) -> str:
    name = (argument.metavar or argument.name).upper()
    return name if argument.required else f"[{name}]"


def _spelt(option: Any) -> str:
    """`--output`, `-o` FILE as in the help."""
    value = "" if option.is_flag else f" {_value(option)}"
    return ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))


def _value(option: Any) -> str:
    if option.metavar:
        return str(option.metavar)
    shown = option.display_type(
        typer.Context(typer.main.get_command(app))
    )  # as <int range> or <list[str]>
    kind = next(name for name in VALUES if name in shown)
    return VALUES[kind]


def _help(entry: Any) -> str:
    text, default = _cell(entry.help or ""), entry.default
    if entry.multiple:
        text += " It may be repeated." if "repeat" not in text else ""
    if entry.required and entry.param_type_name == "option":
        text += " Required."
    if not (default is None or default is False) and "default" not in text:
        text += f" Default: `{default}`."
    return text


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page())
