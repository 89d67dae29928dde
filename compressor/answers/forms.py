"""Forms of questions: the chat template or plain text, few-shot examples, and how answers are
generated."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from compressor.answers.server import Server
from compressor.answers.tasks import EvaluationOptions, EvaluationTask, generation_settings
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.formatting import known_names, one_line
from compressor.frozen import frozen
from compressor.model.tokenizer import load_tokenizer, templates_of
from compressor.prompt_date import date_facts, today
from compressor.records import Json

SERVED = "the server's own"  # name of a chat template that only a server knows
DEFAULT = "default"  # name of a tokenizer's only chat template
SHOWN = 12  # digits of a digest
PLAINLY = "--no-apply-chat-template"


@frozen
class TaskForm:
    """How one model is asked the items of a task."""

    chat_template: str | None  # its name; None if items are asked plainly
    chat_template_sha256: str | None  # of its text; None of a server's own
    num_fewshot: tuple[int, ...]  # examples, in order of the task's parts, each number once
    fewshot_as_multiturn: bool
    system_instruction: str | None
    enable_thinking: bool | None
    think_end_token: Any  # text, or the number of a token
    gen_kwargs: Json | None  # None if nothing is generated
    seed: int | None
    repeats: int
    date: str | None = None  # that the template writes; None if it writes none


def task_forms(
    source: ModelSource,
    server: Server | None,
    tasks: Sequence[EvaluationTask],
    options: EvaluationOptions,
) -> dict[str, TaskForm]:
    """Return the form of each task for a model, or for the server that runs it.

    Raises `CompressionError` for a chat template that is needed and not there.
    """
    chosen = options.apply_chat_template
    may_chat = bool(chosen) or (chosen is None and any(task.generates for task in tasks))
    templates = templates_of(load_tokenizer(source.folder)) if may_chat else {}
    forms = {}
    for task in tasks:
        uses_template = bool(templates) and task.generates if chosen is None else bool(chosen)
        name = digest = date = None
        if uses_template and server is not None and task.generates:
            if isinstance(chosen, str):
                raise CompressionError(
                    f"{server.label} uses its own chat template; leave out {chosen!r} after "
                    "--apply-chat-template"
                )
            name = SERVED
            date = today() if date_facts(templates) else None
        elif uses_template:
            name = chosen if isinstance(chosen, str) else DEFAULT
            if name not in templates:
                raise CompressionError(
                    f"{source.label} has no chat template {name!r}; "
                    f"{known_names(name, templates)}; name one with --apply-chat-template, or pass "
                    f"{PLAINLY}"
                )
            digest = hashlib.sha256(templates[name].encode()).hexdigest()
            date = date_facts(templates, name).get("date")
        settings = generation_settings(task, options)
        examples = dict.fromkeys(
            part.get_config("num_fewshot") or 0 for part in task.parts.values()
        )
        forms[task.name] = TaskForm(
            name,
            digest,
            tuple(examples),
            uses_template and options.fewshot_as_multiturn is not False,
            options.system_instruction,
            options.enable_thinking,
            options.think_end_token,
            settings,
            options.seed,
            options.repeats if samples(settings) else 1,
            date,
        )
    needs_template = options.enable_thinking or options.fewshot_as_multiturn
    if tasks and needs_template and not any(form.chat_template for form in forms.values()):
        raise CompressionError(
            "--enable-thinking and --fewshot-as-multiturn are of a chat template, and "
            f"{source.label} is asked without one; add --apply-chat-template"
        )
    return forms


def samples(settings: Json | None) -> bool:
    """Return True if answers are drawn, so that another seed gives others."""
    settings = settings or {}
    return bool(settings.get("do_sample", settings.get("temperature", 0) > 0))


def same_forms(
    base: Mapping[str, TaskForm], smaller: Mapping[str, TaskForm], labels: tuple[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the facts of each task's form; raise `CompressionError` where two models would be
    asked differently.

    What template a server applies is its own matter, and recorded as such.
    """
    facts = {}
    for task, form in base.items():
        other = smaller[task]
        names = (form.chat_template, other.chat_template)
        differ = form.chat_template_sha256 != other.chat_template_sha256
        if SERVED in names:
            differ = None in names
        if differ:
            ways = [_way(asdict(form)), _way(asdict(other))]
            raise CompressionError(
                f"task {task!r} would be asked of {labels[0]} {ways[0]} and of {labels[1]} "
                f"{ways[1]}; give both the same tokenizer files, or pass {PLAINLY}"
            )
        if form.date != other.date and ((form.date and other.date) or SERVED not in names):
            dates = [each.date or "not known" for each in (form, other)]
            raise CompressionError(
                f"the chat template writes the date, which for task {task!r} is {dates[0]} in "
                f"prompts of {labels[0]} and {dates[1]} in those of {labels[1]}; evaluate both on "
                "one day, or make the baseline anew"
            )
        facts[task] = asdict(form)
        if names[0] != names[1]:
            facts[task]["compressed_chat_template"] = other.chat_template
    return facts


def form_sentences(forms: Mapping[str, Json]) -> list[str]:
    """Return a sentence for tasks of each form, from the facts of the forms."""
    tasks: dict[str, list[str]] = {}
    for task, form in forms.items():
        parts = [_way(form)]
        if form.get("compressed_chat_template"):
            parts[0] += f" (of the compressed model {form['compressed_chat_template']})"
        for name, value in form.items():
            if value is not None and "chat_template" not in name:
                shown = "/".join(map(str, value)) if name == "num_fewshot" else one_line(str(value))
                parts.append(f"{name} {shown}")
        tasks.setdefault(", ".join(parts), []).append(task)
    return [f"Asked {way}: {', '.join(tasks[way])}." for way in sorted(tasks)]


def _way(form: Json) -> str:
    """Return how the text of a question is made."""
    name = form["chat_template"]
    if name is None:
        return "plainly"
    digest = form["chat_template_sha256"]
    return f"in the chat template {name}" + (f" (sha256 {digest[:SHOWN]})" if digest else "")
