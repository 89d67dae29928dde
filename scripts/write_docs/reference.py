"""The reference of commands, steps, plans and servers, made from the code that runs; `make docs` puts it into the site."""

import inspect
import json
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
from scripts.benchmarks import frame

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
COMMANDS = "reference/command-line.md"  # in the site
PLUGINS = FOLDER.parent / "plugins.md"
SCHEMA = FOLDER / "plan.schema.json"
STEPS = (Prune, Constants, Routers, Distill, Quantize)
DESCRIBED = (Prune, Correct, *STEPS[1:])
WHOLE = {"gate": gate.gate, "compare": measure.compare}  # their `--help` shows few options
VALUES = {"int": "N", "float": "X", "path": "PATH", "str": "TEXT"}
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
    page = (FOLDER.parent / COMMANDS).read_text(encoding="utf-8")
    for _, mark, table in TABLES[:3]:
        page = page.replace(mark, table())
    return page


def command_sections() -> str:
    """Return a section for each command."""
    return "\n".join(_command_section(name, command) for name, command in commands().items())


def shorthands_table() -> str:
    """Return a row for each option of `compress` that is short for a path."""
    rows = []
    for path, option in sorted(recipe_options()):
        if option.name not in ("option", "no_merge_routers", *SHOWN):
            rows.append((f"`--{option.name.replace('_', '-')}`", f"`{path}`"))
    return frame.table(["option", "field"], rows)


def step_sections() -> str:
    """Return a section for each built-in step."""
    return "\n".join(map(_step_section, DESCRIBED)).rstrip()


def _step_section(step: Any) -> str:
    """Return the options of a step: its fields."""
    rows = []
    for field, entry in step.model_fields.items():
        default = entry.get_default(call_default_factory=True)
        if isinstance(default, Correct):
            default = default.method
        shown = "" if default is None or default == {} else f" Default: `{json.dumps(default)}`."
        rows.append((f"`{field}`", _cell(entry.description or "") + shown))
    heading = f"### {getattr(step, 'name', 'correct, of prune and constants')}"
    text = _cell((step.__doc__ or "").partition(OPTIONS)[0])
    return "\n".join([heading, "", text, "", frame.table(["option", "meaning"], rows), ""])


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
    tables = {"argument": [(f"`{shown[entry.name]}`", _help(entry)) for entry in arguments]}
    for panel in dict.fromkeys((None, *PANELS, *(entry.rich_help_panel for entry in options))):
        rows = tables.setdefault(panel or "option", [])
        for entry in options:
            if entry.rich_help_panel == panel and not entry.hidden:
                value = "" if entry.is_flag else f" {_value(entry)}"
                names = [f"`{name}{value}`" for name in (*entry.opts, *entry.secondary_opts)]
                rows.append((", ".join(names), _help(entry)))
    for title, rows in tables.items():
        lines += [frame.table([title, "meaning"], rows), ""] if rows else []
    return "\n".join(lines)


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
        shape = schema(name) if definition is None else schema(name)["$defs"][definition]
        rows = []
        for field, entry in shape["properties"].items():
            needed = "" if field in shape["required"] else ", optional"
            rows.append((f"`{field}`", _type(entry) + needed, entry["description"]))
        parts += [f"## {title}", frame.table(["field", "type", "meaning"], rows)]
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
    begin, end = "<!-- statistics: begin -->", "<!-- statistics: end -->"
    rows = [(f"`{name}`", entry.shape or "-", entry.meaning) for name, entry in STATISTICS.items()]
    before, rest = PLUGINS.read_text(encoding="utf-8").split(begin)
    return f"{before}{begin}\n{frame.table(['Statistic', 'Shape', 'Meaning'], rows)}\n{end}{rest.split(end)[1]}"


def servers_table() -> str:
    """Return a row for each rule of a server."""
    evidence = {"read": "", "run": "; seen when run", "reported": "; reported, not seen"}
    rows = []
    for rule in RULES:
        is_path = ";" not in rule.source and " " not in rule.source
        source = f"`{rule.source}`" if is_path else rule.source
        source += f", {rule.version}, {rule.date}{evidence[rule.evidence]}"
        whom, example = ", ".join(rule.families) or rule.whom, breach_text(rule, EXAMPLE)
        rows.append((rule.server, whom, rule.needs, example, rule.effect, source))
    columns = ["server", "for", "full speed where", "otherwise, for example", "effect", "source"]
    return frame.table(columns, rows)


TABLES = (  # page of the site, the mark that the table replaces, and what makes it
    (COMMANDS, "<!-- commands -->", command_sections),
    (COMMANDS, "<!-- shorthands -->", shorthands_table),
    (COMMANDS, "<!-- steps -->", step_sections),
    ("reference/plan.md", "<!-- tables -->", plan_tables),
    ("reference/servers.md", "<!-- rules -->", servers_table),
)
