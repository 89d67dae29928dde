"""Options of answers, tasks and servers. Importing this loads no torch."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from compressor.answers.task_suites import TaskSettings, with_suite
from compressor.errors import CompressionError, reason_of
from compressor.extras import TASKS, require
from compressor.options import NamedOptions, one_or_several, separated
from compressor.records import Json, value_as

SEEDS = {
    "random_seed": 0,
    "numpy_random_seed": 1234,
    "torch_random_seed": 1234,
    "fewshot_random_seed": 1234,
}
# as lm-eval reads them
TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
NEW_TOKENS = 512  # default limit of an answer, where half of the model's positions are no fewer


class GenerationOptions(NamedOptions):
    """Limits and sampling of generated text."""

    max_new_tokens: PositiveInt = 128
    """Tokens to generate, at most."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature. 0 takes the most probable token."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the smallest set of tokens with this total probability."""
    top_k: PositiveInt | None = None
    """Sample from this many of the most probable tokens."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Random seed for sampling."""
    chat: bool = False
    """Put the prompt into the chat template, as a user's message."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise CompressionError(
                "--top-p and --top-k have no effect without sampling; add --temperature 1"
            )
        return self

    def facts(self, *names: str) -> Json:
        """Return some of the options by name."""
        return {name: getattr(self, name) for name in names}


class AnswerOptions(NamedOptions):
    """Prompts, and how models answer them."""

    prompts: tuple[str, ...] = ()
    """Prompts that both models answer, as SOURCE or SOURCE=DOMAIN. A text, JSONL or parquet file, a
    data set or 'demo'. May be repeated. Of a chat all but the last answer."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Tokens of an answer, at most (default: 512, or half of the model's positions)."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature. 0 takes the most probable token."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the smallest set of tokens with this total probability."""
    seeds: int = Field(1, ge=1)
    """Answers to each prompt, each drawn with another seed."""
    chat: bool = False
    """Put prompts of plain text into the chat template, as a user's message."""
    strict: bool = Field(False, exclude=True)  # as that of `TextOptions`
    """End at a row that cannot be read, instead of leaving it out."""

    _one_prompt = field_validator("prompts", mode="before")(one_or_several)

    def check(self) -> None:
        """Raise `CompressionError` for options that do not go together."""
        self.generation(NEW_TOKENS)
        if self.seeds > 1 and not self.temperature:
            raise CompressionError("--seeds has no effect without sampling; add --temperature 1")

    def generation(self, usual: int) -> GenerationOptions:
        """Return how each answer is generated, with `usual` tokens at most unless the options give
        another number."""
        return GenerationOptions(
            max_new_tokens=self.max_new_tokens or usual,
            temperature=self.temperature,
            top_p=self.top_p,
            chat=self.chat,
        )


class AskedOptions(NamedOptions):
    """How tasks are asked: all that files of others, suites and baselines, may set. None trusts a
    file, none judges."""

    tasks: tuple[str, ...] = ()
    """lm-eval tasks to pass, comma-separated."""
    # of tasks by name, from a suite
    settings: dict[str, TaskSettings] = Field(default_factory=dict)
    limit: int | None = Field(None, ge=1)
    """Items of each task, the first ones (default: all)."""
    apply_chat_template: bool | str | None = None
    """Ask in the tokenizer's chat template, or in its template of this name.
    --no-apply-chat-template asks plainly. Tasks that are generated use the template by default,
    where there is one."""
    fewshot_as_multiturn: bool | None = None
    """In a chat template few-shot examples are turns of the conversation (default), or part of one
    message."""
    num_fewshot: int | None = Field(None, ge=0)
    """Few-shot examples before each item (default: as each task says)."""
    system_instruction: str | None = None
    """System prompt, or plain text, before each item."""
    enable_thinking: bool | None = None
    """Value of enable_thinking for the chat template (default: the template's)."""
    think_end_token: str | int | None = None
    """Text or number of the token that ends thinking. What is before it is no part of an answer."""
    gen_kwargs: dict[str, Any] | None = None
    """How answers are generated, over what a task says: temperature=0.6,top_p=0.95 or JSON."""
    max_gen_toks: int | None = Field(None, ge=1)
    """Tokens of a generated answer, at most (default: as each task says, or 256)."""
    cut_counts_as_wrong: bool = False
    """Count a generated answer that reaches the token limit as wrong, whatever it says."""
    seed: int | None = Field(None, ge=0, lt=2**32)
    """Seed of examples, shuffles and sampling (default: lm-eval's own, 0,1234,1234,1234)."""
    repeats: int = Field(1, ge=1)
    """Samples of each generated answer, with seeds that follow each other. An item's score is their
    mean."""

    _split_tasks = field_validator("tasks", mode="before")(separated)

    @field_validator("apply_chat_template", mode="before")
    @classmethod
    def _read_switch(cls, value: Any) -> Any:
        return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value

    @field_validator("gen_kwargs", mode="before")
    @classmethod
    def _read_pairs(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        require(*TASKS)
        from lm_eval._cli.utils import key_val_to_dict, try_parse_json

        try:
            parsed = try_parse_json(value.strip())
            return key_val_to_dict(parsed) if isinstance(parsed, str) else dict(parsed)
        except (TypeError, ValueError) as error:
            raise CompressionError(
                f"--gen-kwargs {value!r} cannot be read ({reason_of(error)}); write "
                "key=value,key=value or JSON"
            ) from error

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        temperature = self.generation_settings.get("temperature", 0.0)
        value_as(temperature, NonNegativeFloat, "the temperature of --gen-kwargs")
        limits = [name for name in self.gen_kwargs or () if name in TOKEN_LIMITS]
        if self.max_gen_toks is not None and limits:
            raise CompressionError(
                f"--max-gen-toks and --gen-kwargs {limits[0]} say the same; give one of the two"
            )
        return self

    @property
    def generation_settings(self) -> Json:
        """How answers are generated, as far as the options say, by lm-eval's names."""
        limit = {} if self.max_gen_toks is None else {"max_gen_toks": self.max_gen_toks}
        return {**(self.gen_kwargs or {}), **limit}

    @property
    def random_seeds(self) -> dict[str, int]:
        """Seeds of Python, NumPy, PyTorch and few-shot examples, as arguments of lm-eval."""
        return {name: usual if self.seed is None else self.seed for name, usual in SEEDS.items()}


class TaskOptions(AskedOptions):
    """Tasks of lm-eval, and how models answer them."""

    # whose options stand in its place once it is read
    suite: str | None = Field(None, exclude=True)
    """Tasks with their settings: base, chat, code, math, or a YAML file, also of vLLM's form. Other
    options override it."""
    include_path: Path | None = None
    """A folder with lm-eval task files of your own."""
    batch_size: int | Literal["auto"] = "auto"
    """Batch size of the evaluation: auto or a number."""
    stream: bool | None = None
    """Evaluate with one layer in memory at a time, or with the whole model (default: streamed where
    the model does not fit into memory)."""
    confirm_run_unsafe_code: bool = False
    """Run tasks that execute the code which a model writes."""

    @model_validator(mode="before")
    @classmethod
    def _read_suite(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("suite") is None:
            return values
        return with_suite(values, cls, AskedOptions)

    @field_validator("batch_size", mode="before")
    @classmethod
    def _read_batch_size(cls, value: Any) -> int | str:
        text = str(value).strip()
        if text == "auto":
            return text
        if text.isdecimal() and int(text) > 0:
            return int(text)
        raise ValueError(f"batch_size is {value}; it should be auto, or a number of at least 1")


SECONDS = 300.0  # to wait for an answer
MOST_SECONDS = 1e6


class ServerOptions(NamedOptions):
    """Addresses of the servers that run the models."""

    server: str | None = None
    """Address of an OpenAI-compatible server of the smaller model."""
    served_model: str | None = None
    """Its name there (default: the only one that the server has)."""
    base_server: str | None = None
    """Address of a server that runs the base."""
    base_served_model: str | None = None
    """The base's name there."""
    timeout: float = Field(SECONDS, gt=0, le=MOST_SECONDS)
    """Seconds to wait for each answer of a server."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name, needed in (("served_model", "server"), ("base_served_model", "base_server")):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                first, second = (f"--{each.replace('_', '-')}" for each in (name, needed))
                raise CompressionError(f"{first} goes with {second}; name the server's address")
        return self
