"""The reference of commands, steps, plans and servers, made from the code that runs; `make docs` puts it into the site."""

import inspect
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import typer

from compressor import Constants, Correct, Distill, Prune, Quantize, Routers
from compressor.cli import gate, measure
from compressor.cli.main import app
from compressor.cli.options import PANELS, with_all_options
from compressor.cli.settings import SHOWN, recipe_options
from compressor.model.serving import RULES, Served, breach_text
from compressor.options import OPTIONS
from compressor.statistics.statistics import STATISTICS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
COMMANDS = "reference/command-line.md"  # in the site
PLUGINS = FOLDER.parent / "plugins.md"
SCHEMA = FOLDER / "plan.schema.json"
STEPS = (Prune, Constants, Routers, Distill, Quantize)
DESCRIBED = (Prune, Correct, *STEPS[1:])
WHOLE = {"gate": gate.gate, "compare": measure.compare}  # their `--help` shows few options
VALUES = {"int": "N", "float": "X", "path": "PATH", "str": "TEXT"}
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
| 130 | interrupted; the same command resumes where it stopped |
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
OBJECTS = (  # of plans and records, with the schema and the definition that describe them
    ("The plan", "plan", None),
    ("`source`", "plan", "source"),
    ("`calibration`", "plan", "calibration"),
    ("An entry of `steps`", "plan", "step"),
    ("`split` of a plan of `prune`", "plan", "split"),
    ("`plan` of `prune`", "plan", "pruned"),
    ("`plan` of `constants`", "plan", "constants"),
    ("`plan` of `quantize`", "plan", "quantized"),
    ("`result` of `routers` and `distill`", "plan", "evaluated"),
    ("An entry of `layers`", "plan", "layer"),
    ("An entry of `groups`", "plan", "group"),
    ("compression.json", "compression", None),
    ("`heldout`", "compression", "heldout"),
    ("An entry of `domains`", "compression", "domain"),
    ("Its `loss`, `kl` and `flips`", "compression", "paired"),
)
EXAMPLE = Served("mixtral", 44, 12, 96)  # the model of the servers' example


@cache
def commands() -> dict[str, Any]:
    """Return the commands by name, in the order of the help; those of a group by both names."""
    group: Any = typer.main.get_command(app)
    found = dict[str, Any]()
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if name in WHOLE:
            command = with_all_options(WHOLE[name])
        inner = getattr(command, "commands", {})
        found |= {f"{name} {sub}": entry for sub, entry in inner.items()} or {name: command}
    return found


@cache
def commands_page() -> str:
    """Return the page of commands and steps as Markdown."""
    parts = [INTRODUCTION, *(_command_section(*entry) for entry in commands().items()), SHORTHANDS]
    for path, option in sorted(recipe_options()):
        if option.name not in ("option", "no_merge_routers", *SHOWN):
            parts.append(f"| `--{option.name.replace('_', '-')}` | `{path}` |")
    parts += ["", STEPS_INTRODUCTION, *map(_step_section, DESCRIBED)]
    return "\n".join(parts)


def _step_section(step: Any) -> str:
    """Return the options of a step: its fields."""
    name = getattr(step, "name", "correct, of prune and constants")
    rows = []
    for field, entry in step.model_fields.items():
        default = entry.get_default(call_default_factory=True)
        if isinstance(default, Correct):
            default = default.method
        shown = "" if default is None or default == {} else f" Default: `{json.dumps(default)}`."
        rows.append((f"`{field}`", _cell(entry.description or "") + shown))
    text = _cell((step.__doc__ or "").partition(OPTIONS)[0])
    return "\n".join([f"### {name}", "", text, "", *_table("option", rows), ""])


def _command_section(name: str, command: Any) -> str:
    arguments = [entry for entry in command.params if entry.param_type_name == "argument"]
    options = [entry for entry in command.params if entry.param_type_name == "option"]
    shown = {}
    for entry in arguments:
        metavar = (entry.metavar or entry.name).upper()
        shown[entry.name] = metavar if entry.required else f"[{metavar}]"
    usage = ["moe-compress", name, *shown.values()]
    usage += [f"{entry.opts[0]} {_value(entry)}" for entry in options if entry.required]
    text = _cell(inspect.cleandoc(command.help or ""))
    lines = [f"## {name}", "", text, "", "```text", f"{' '.join(usage)} [OPTIONS]", "```", ""]
    if arguments:
        rows = [(f"`{shown[entry.name]}`", _help(entry)) for entry in arguments]
        lines += [*_table("argument", rows), ""]
    for panel in dict.fromkeys((None, *PANELS, *(entry.rich_help_panel for entry in options))):
        inside = [entry for entry in options if entry.rich_help_panel == panel and not entry.hidden]
        rows = []
        for entry in inside:
            value = "" if entry.is_flag else f" {_value(entry)}"
            names = (f"`{name}{value}`" for name in (*entry.opts, *entry.secondary_opts))
            rows.append((", ".join(names), _help(entry)))
        lines += [*_table(panel or "option", rows), ""] if rows else []
    return "\n".join(lines)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    lines = [f"| {title} | meaning |", "|---|---|"]
    return lines + [f"| {name} | {meaning} |" for name, meaning in rows]


def _value(option: Any) -> str:
    if option.metavar:
        return str(option.metavar)
    context = typer.Context(typer.main.get_command(app))
    shown = option.display_type(context)  # such as <int range> or <list[str]>
    return VALUES[next(name for name in VALUES if name in shown)]


def _help(entry: Any) -> str:
    text, default = _cell(entry.help or ""), entry.default
    if entry.multiple and "repeat" not in text:
        text += " It may be repeated."
    if entry.required and entry.param_type_name == "option":
        text += " Required."
    if default is not None and default is not False and "default" not in text:
        text += f" Default: `{default}`."
    return text


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def schema(name: str) -> dict[str, Any]:
    """Return one of the two schemas: plan or compression."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))
    return content


def schema_with_options() -> dict[str, Any]:
    """Return the schema of plans with each step's options as its class declares them."""
    whole = schema("plan")
    parts = {name: part for name, part in whole["$defs"].items() if not name.endswith("_options")}
    for step in STEPS:
        declared = json.dumps(step.model_json_schema(ref_template="#/$defs/{model}_options"))
        found = json.loads(declared.replace("\\n", " "))  # a description on one line
        parts |= {f"{name}_options": part for name, part in found.pop("$defs", {}).items()}
        parts[f"{step.name}_options"] = found
    return {**whole, "$defs": parts}


def plan_tables() -> str:
    """Return a heading and a table for each object of plans and records."""
    parts = []
    for title, name, definition in OBJECTS:
        whole = schema(name)
        shape = whole if definition is None else whole["$defs"][definition]
        lines = [f"## {title}", "", "| field | type | meaning |", "|---|---|---|"]
        for field, entry in shape["properties"].items():
            needed = "" if field in shape["required"] else ", optional"
            lines.append(f"| `{field}` | {_type(entry)}{needed} | {entry['description']} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _type(entry: dict[str, Any]) -> str:
    if "const" in entry:
        return f"`{json.dumps(entry['const'])}`"
    if "enum" in entry:
        return " or ".join(f"`{json.dumps(value)}`" for value in entry["enum"])
    if "anyOf" in entry:
        return " or ".join(map(_type, entry["anyOf"]))
    if "$ref" in entry:
        return "list of integers" if entry["$ref"].endswith("expertList") else "object"
    if entry["type"] in ("array", ["array"]):
        return f"list of {_type(entry['items'])}s"
    return entry["type"] if isinstance(entry["type"], str) else " or ".join(entry["type"])


def statistics_page() -> str:
    """Return docs/plugins.md with the table of statistics as it is now."""
    lines = ["| Statistic | Shape | Meaning |", "|---|---|---|"]
    for name, entry in STATISTICS.items():
        lines.append(f"| `{name}` | {entry.shape or '-'} | {entry.meaning} |")
    before, rest = PLUGINS.read_text(encoding="utf-8").split("<!-- statistics: begin -->")
    _, after = rest.split("<!-- statistics: end -->")
    table = "\n".join(lines)
    return f"{before}<!-- statistics: begin -->\n{table}\n<!-- statistics: end -->{after}"


def servers_table() -> str:
    """Return a row for each rule of a server."""
    evidence = {"read": "", "run": "; seen when run", "reported": "; reported, not seen"}
    lines = [
        "| server | for | full speed where | otherwise, for example | effect | source |",
        "|---|---|---|---|---|---|",
    ]
    for rule in RULES:
        is_path = ";" not in rule.source and " " not in rule.source
        source = f"`{rule.source}`" if is_path else rule.source
        source += f", {rule.version}, {rule.date}{evidence[rule.evidence]}"
        example = breach_text(rule, EXAMPLE)
        cells = (
            rule.server,
            ", ".join(rule.families) or rule.whom,
            rule.needs,
            example,
            rule.effect,
            source,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = (  # page of the site, the mark that the table replaces, and what makes it
    ("reference/plan.md", "<!-- tables -->", plan_tables),
    ("reference/servers.md", "<!-- rules -->", servers_table),
)
