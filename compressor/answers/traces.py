"""Traces: a model's own complete answers to prompts, as text that it is calibrated on.

Each line of the file has the text as the model saw and wrote it, from the start of the prompt to
its own end token, and the same as messages. What it did not end by itself is dropped and counted. A
manifest beside it says how it was made."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor.answers.answering import Answer, Model, answer_all, journal_of
from compressor.answers.prompts import Prompt, PromptSet, is_chat
from compressor.errors import CompressionError
from compressor.files import file_digest, json_object, lock_output, replacing
from compressor.formatting import counted
from compressor.frozen import frozen
from compressor.model.tokenizer import render_chat
from compressor.progress import Progress
from compressor.prompt_date import dated
from compressor.records import Json, plain_json, read_as, readable_json
from compressor.run_record import report_in_place, request_key, versions

FORMAT = "moe-compressor-traces/1"
SUFFIX = ".jsonl"
UNENDED, EMPTY = "not ended by itself", "empty"


@frozen
class Traces:
    """Numbers of answers that were requested and kept, and their files."""

    model: str
    asked: int
    kept: int
    dropped: Mapping[str, int]  # by reason
    domains: Mapping[str, int]  # of what was kept
    file: Path = Path()
    manifest: Path = Path()


def write_traces(
    model: Model, prompts: PromptSet, out: Path, progress: Progress, overwrite: bool
) -> Traces:
    """Write a model's complete answers into `out`; a run that was killed goes on when it is
    repeated.

    Files that this very request has put in place stay. Raises `CompressionError` for other files
    that are there already, and where no answer is complete."""
    if out.suffix != SUFFIX:
        raise CompressionError(
            f"{out} should end in {SUFFIX}, so that --calibration reads it line by line"
        )
    manifest = out.with_suffix(".manifest.json")
    earlier = json_object(manifest)
    known = None if overwrite else earlier.get("date")
    with lock_output(out) as folder, ExitStack() as stack:
        if not known:  # the date in the prompts that a killed run has had answered
            journals = folder.glob("answers-*-*-*-*.jsonl")
            known = max((path.stem[-len("2000-01-01") :] for path in journals), default=None)
        date = stack.enter_context(dated(known))
        tokenizer, facts = model.opened()
        prompts, options = prompts.fitted([(tokenizer, facts)])
        journal = journal_of(model, options, folder)
        requests = prompts.requests
        named = [(prompt.id, prompt.domain, seed) for prompt, seed in requests]
        request = request_key(journal.path.name, named)
        is_same = earlier.get("request") == request
        if (
            is_same
            and not overwrite
            and out.is_file()
            and file_digest(out) == earlier.get("sha256")
        ):
            report_in_place(out)
            journal.path.unlink(missing_ok=True)
            return replace(read_as(Traces, earlier, str(manifest)), file=out, manifest=manifest)
        if out.exists() or not is_same:  # else a run was killed between its two files
            _check_files(out, manifest, overwrite)
        rows = []
        dropped = Counter[str]()
        answers = answer_all(model, requests, options, folder, progress)
        for (prompt, _), answer in zip(requests, answers, strict=True):
            if answer.ended != "end":
                dropped[UNENDED] += 1
            elif not answer.text.strip():
                dropped[EMPTY] += 1
            else:
                rows.append(trace(prompt, answer, tokenizer, options.chat))
        if not rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
            raise CompressionError(
                f"none of {counted(len(requests), 'answer')} of {model.label} is complete "
                f"({reasons}); raise --max-new-tokens from {options.max_new_tokens}, or give "
                "prompts as the model knows them (--chat)"
            )
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        domains = Counter(row["domain"] for row in rows)
        traces = Traces(
            model=model.label,
            asked=len(requests),
            kept=len(rows),
            dropped=dict(dropped),
            domains=dict(domains),
            file=out,
            manifest=manifest,
        )
        content = {
            "format": FORMAT,
            **plain_json(traces),
            "made_by": plain_json(model.facts),
            "options": options.facts("max_new_tokens", "temperature", "top_p", "chat"),
            "seeds": [*range(prompts.seed, prompts.seed + prompts.options.seeds)],
            "prompts": len(prompts.prompts),
            "request": request,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "versions": versions(),
        }
        if date.is_used:
            content["date"] = str(date)
        del content["file"], content["manifest"]
        if out.exists() or not is_same:
            _check_files(out, manifest, overwrite)
        # the last is put in place first: a manifest alone says what is missing
        with ExitStack() as complete:
            for path, written in ((out, text), (manifest, readable_json(content))):
                fresh = complete.enter_context(replacing(path, folder / f"{path.name}.new"))
                fresh.write_text(written, encoding="utf-8")
        journal.path.unlink(missing_ok=True)
    return traces


def _check_files(out: Path, manifest: Path, overwrite: bool) -> None:
    """Refuse files that are there already, or that `overwrite` must not replace."""
    for path in (out, manifest):
        if path.exists() and not (overwrite and path.is_file()):
            raise CompressionError(
                f"{path} is there already; name another file, or pass --overwrite"
            )
    if manifest.exists() and json_object(manifest).get("format") != FORMAT:
        raise CompressionError(
            f"{manifest} is no manifest of traces, so --overwrite will not replace it; name "
            "another file"
        )


def trace(prompt: Prompt, answer: Answer, tokenizer: Any, chat: bool) -> Json:
    """Return a line of the file: the whole text, which calibration reads, and the messages of a
    chat."""
    end = tokenizer.eos_token or ""
    if answer.tokens:
        end = tokenizer.decode([answer.tokens[-1]])
    facts = {"id": prompt.id, "seed": answer.seed, "domain": prompt.domain}
    if not is_chat(prompt, tokenizer, chat):
        return {"text": f"{prompt.text}{answer.text}{end}", **facts}
    before = render_chat(tokenizer, prompt.chat, tools=prompt.tools, add_generation_prompt=True)
    messages = [*prompt.chat, {"role": "assistant", "content": answer.text}]
    tools = {"tools": prompt.tools} if prompt.tools else {}
    return {"text": f"{before}{answer.text}{end}", "messages": messages, **tools, **facts}
