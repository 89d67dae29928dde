"""Asks a server of OpenAI's API (vLLM, SGLang, llama-server) for its answers to golden prompts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pydantic import PositiveFloat

from compressor.answers.server import Checked, RefusedError, Server
from compressor.errors import CompressionError
from compressor.golden.answers import KEPT, LEAST, GoldenAnswers, Top
from compressor.golden.compare import FAR, Answered, widest_band
from compressor.prompt_date import today
from compressor.records import Json

FORMS: Sequence[Json] = (  # of a request for log-probabilities, the best first
    {"logprobs": KEPT, "return_tokens_as_token_ids": True},
    {"logprobs": KEPT},
    {"logprobs": 5},  # the most that some servers give
)
GREEDY = {"max_tokens": 1, "temperature": 0}
ASKED = 3  # prompts by which vocabulary and template are known
FEWEST = 3  # tokens of an answer that can be compared
BROKEN = "\ufffd"
CHAT = 0.05  # nats by which an answer may differ from the same one asked by ids


Pair = tuple[Top, Top] | None  # a golden answer, and the one that came


class Weights(Checked):
    """What llama-server says of its model."""

    size: PositiveFloat  # bytes
    n_params: PositiveFloat


class Vocabulary:
    """The tokens of golden answers by the names that servers give them."""

    def __init__(self, golden: GoldenAnswers) -> None:
        counts = Counter(golden.texts.values())
        self.by_text = {
            text: int(token) for token, text in golden.texts.items() if counts[text] == 1
        }
        self.unclear = {text for text, count in counts.items() if count > 1}

    def read(self, logs: Mapping[str | int, float], golden: Top) -> Pair:
        """Return the golden and the given answer, both of the tokens that can be told apart.

        None if these are few.
        """
        tokens = dict[int, float]()
        by_id = False
        for name, log in logs.items():
            if isinstance(name, int):
                by_id = True
                token = name
            elif name in self.unclear or BROKEN in name:
                continue
            else:
                token = self.by_text.get(name, -1 - len(tokens))
            tokens[token] = max(log, LEAST)
        clear = {*golden.tokens} if by_id else {*self.by_text.values()}
        first = {
            token: log
            for token, log in zip(golden.tokens, golden.logs, strict=True)
            if token in clear
        }
        if min(len(first), len(tokens)) < min(FEWEST, len(golden.tokens)):
            return None
        best = sorted(tokens, key=tokens.__getitem__, reverse=True)
        given = Top(tuple(best), tuple(tokens[token] for token in best))
        return Top(tuple(first), tuple(first.values())), given


def ask_server(golden: GoldenAnswers, server: Server) -> Answered:
    """Return the answers of a server.

    Raises `CompressionError` for another vocabulary, and where it gives no log-probabilities.
    """
    form = _find_form(golden, server)
    vocabulary = Vocabulary(golden)

    def ask(number: int) -> tuple[dict[int, Pair], bool]:
        """Return the answers from this number on, and True if one that was asked for is missing.

        Those after tokens of the server's own are compared as long as these agree.
        """
        prompt_number, position = golden.places[number]
        prompt = golden.prompts[prompt_number]
        begin = position + 1
        steps = prompt.continued if begin == len(prompt.given) else 0
        question = {**form, "prompt": list(prompt.ids[:begin]), "max_tokens": 1 + steps}
        (choice,) = server.complete({**GREEDY, **question}).choices
        pairs = dict[int, Pair]()
        for step in range(1 + steps):
            logs = choice.logs(step)
            if not logs:
                has_ended = step > 0 and choice.finish_reason == "stop"
                return pairs, not has_ended
            pair = vocabulary.read(logs, golden.top[number + step])
            pairs[number + step] = pair
            if pair is None or (step < steps and pair[1].tokens[0] != prompt.ids[begin + step]):
                break
        return pairs, False

    questions = [number for number in range(len(golden.top)) if number not in golden.decoded]
    answers = dict[int, Pair]()
    unanswered = 0
    for pairs, is_missing in server.all(questions, ask):
        answers |= pairs
        unanswered += is_missing
    if not any(answers.values()):
        raise CompressionError(
            f"{server.label} gives no log-probabilities; start it so that it does (SGLang and "
            "vLLM do by default, llama-server by its /v1/completions)"
        )
    both = [answers.get(number) for number in range(len(golden.top))]
    widest = "fp8" if golden.rounds_inputs else "8-bit"  # where it does not say
    with suppress(ValueError):
        weights = Weights.model_validate(server.facts.get("meta"))
        widest = widest_band(8 * weights.size / weights.n_params)
    return Answered(
        label=server.label,
        top=[pair and pair[1] for pair in both],
        widest=widest,
        other_tokens=_other_template(golden, server, vocabulary, both),
        golden=[pair and pair[0] for pair in both],
        asked=len(answers) + unanswered,
        unanswered=unanswered,
    )


def _find_form(golden: GoldenAnswers, server: Server) -> Json:
    """Return the settings by which the server gives the most log-probabilities.

    Refuses one that makes another number of tokens of a text; one more may open it."""
    texts = [prompt for prompt in golden.prompts if prompt.text is not None]
    for prompt in texts[:ASKED]:
        counted = server.complete({**GREEDY, "prompt": prompt.text}).counted
        if counted is not None and counted - prompt.text_tokens not in (0, 1):
            raise CompressionError(
                f"{server.label} is a server of another model: it makes {counted} tokens of a "
                f"text that has {prompt.text_tokens} in the golden answers; serve this model, or "
                "name that one's with --answers"
            )
    refusal = ""
    for form in FORMS:
        try:
            server.complete({**GREEDY, **form, "prompt": list(golden.prompts[0].ids)})
            return form
        except RefusedError as error:
            refusal = str(error).partition(";")[0]
    raise CompressionError(
        f"{server.label} gives no log-probabilities of tokens that it is asked by id ({refusal}); "
        "serve the model by vLLM, SGLang or llama-server, or name its folder"
    )


def _other_template(
    golden: GoldenAnswers, server: Server, vocabulary: Vocabulary, asked: Sequence[Pair]
) -> tuple[int, ...]:
    """Return the numbers of the prompts that the server puts into another chat template.

    It makes another number of tokens of them, or answers them otherwise than their golden tokens.
    None of them where the template writes the date, which is another one today."""
    if not golden.is_chat or golden.date not in (None, today()):
        return ()
    numbers = list[int]()
    chats = list[int]()
    for number, prompt in enumerate(golden.prompts):
        # few servers take tools, and none renders part of a prompt
        is_whole = prompt.rendered_tokens == len(prompt.given) > 0
        if is_whole and prompt.text and not prompt.tools:
            chats.append(number)
    for number in chats[:ASKED]:
        prompt = golden.prompts[number]
        messages = [{"role": "user", "content": prompt.text}]
        question = {"messages": messages, "logprobs": True, "top_logprobs": KEPT}
        try:
            reply = server.complete({**GREEDY, **question})
        except RefusedError:  # it takes no chats
            continue
        last = golden.places.index((number, len(prompt.given) - 1))
        direct = asked[last]
        pair = vocabulary.read(reply.choices[0].logs(), golden.top[last])
        differs = reply.counted not in (None, prompt.rendered_tokens)
        if pair is not None and direct is not None:
            limit = max(FAR * direct[0].distance(direct[1]), CHAT)
            differs = differs or pair[0].distance(pair[1]) > limit
        if differs:
            numbers.append(number)
    return tuple(numbers)
