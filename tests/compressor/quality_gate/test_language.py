import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from compressor.answers.prompts import Prompt, read_prompts
from compressor.quality_gate.language import is_in_another, refuses, wanted_by
from tests.support.command_line import Run, refused, succeeded

ENGLISH = (
    "The old mill by the river still grinds flour for every village nearby.",
    "Our neighbours planted three apple trees behind their house last autumn.",
    "A good teacher explains difficult things with simple words and patience.",
)
GERMAN = (
    "Die alte Mühle am Fluss mahlt noch heute Mehl für jedes Dorf ringsum.",
    "Unsere Nachbarn haben im letzten Herbst hinter ihrem Haus drei Apfelbäume gepflanzt.",
    "Ein guter Lehrer erklärt auch schwierige Dinge mit einfachen Worten und Geduld.",
)
ASKED = {
    "en": "What is the largest city of this country, and how many people live there?",
    "de": "Wie heißt die größte Stadt dieses Landes, und wie viele Menschen wohnen dort?",
    "ru": "Как называется самый большой город этой страны и сколько людей там живёт?",
    "el": "Ποια είναι η μεγαλύτερη πόλη αυτής της χώρας και πόσοι άνθρωποι ζουν εκεί;",
    "ar": "ما هي أكبر مدينة في هذا البلد وكم عدد الناس الذين يعيشون فيها؟",
    "he": "מהי העיר הגדולה ביותר במדינה הזאת וכמה אנשים גרים בה?",
    "hi": "इस देश का सबसे बड़ा शहर कौन सा है और वहाँ कितने लोग रहते हैं?",
    "th": "เมืองที่ใหญ่ที่สุดของประเทศนี้คือเมืองอะไร และมีคนอาศัยอยู่กี่คน",
    "ko": "이 나라에서 가장 큰 도시는 어디이고 그곳에는 몇 명이 살고 있습니까?",
    "ja": "この国で一番大きい都市はどこですか。そこには何人が住んでいますか。",
    "zh": "这个国家最大的城市是哪一个。那里住着多少人。",
}


@pytest.mark.parametrize("language", ASKED)
def test_each_language_is_told_from_all_others(language: str) -> None:
    wanted = wanted_by(Prompt.of(ASKED[language]))
    assert wanted is not None
    assert [other for other, text in ASKED.items() if not is_in_another(text, wanted)] == [language]


def test_a_language_that_is_named_may_be_answered_in() -> None:
    for question in (
        f"Translate into German: {ENGLISH[0]}",
        f"Переведи на немецкий: {ASKED['ru']}",
        "翻译成德文。今天天气很好我们去公园散步吧",
        f"Summarise this in one sentence: {GERMAN[2]}",
        f"Traduis ceci en allemand, s'il te plaît, et sois bref : {ENGLISH[0]}",
    ):
        wanted = wanted_by(Prompt.of(question))
        assert wanted is not None and not is_in_another(GERMAN[0], wanted)
        assert is_in_another(ASKED["el"], wanted)
    system = {"role": "system", "content": "Always answer in German."}
    wanted = wanted_by(Prompt.of([system, {"role": "user", "content": [{"type": "image"}, ENGLISH[1]]}]))
    assert wanted is not None and not is_in_another(GERMAN[0], wanted)


def test_the_column_language_says_it_alone(tmp_path: Path) -> None:
    names = ("de", "German", "Deutsch ", "de-DE", "deu", "Rust")
    rows = [{"prompt": f"{ENGLISH[0]} {number}", "language": name} for number, name in enumerate(names)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = [wanted_by(prompt) for prompt in read_prompts([str(file)])]
    assert [wanted is not None and is_in_another(ENGLISH[0], wanted) for wanted in told] == [*[True] * 5, False]


def test_a_code_that_may_be_a_programming_language_adds_to_what_the_prompt_asks_for() -> None:
    for code in ("cs", "PL"):
        wanted = wanted_by(replace(Prompt.of(ENGLISH[0]), language=code))
        assert wanted is not None and code.lower() in wanted.languages
        assert not is_in_another(ENGLISH[1], wanted) and is_in_another(GERMAN[0], wanted)


def test_nothing_is_said_of_what_is_short_or_code_and_another_script_is_another() -> None:
    wanted = wanted_by(Prompt.of(ASKED["ru"]))
    assert wanted is not None
    for text in ("42", "Да.", "```python\ndef largest(cities):\n    return max(cities, key=population)\n```"):
        assert not is_in_another(text, wanted)
    assert wanted_by(Prompt.of("2 + 2 = ?")) is None
    english = wanted_by(Prompt.of(ASKED["en"]))
    assert english is not None
    for text in ("Leonardo da Vinci", "apple, banana, kiwi, mango, pear", "1. e4 e5 2. Nf3 Nc6 3. Bb5 a6 4. Ba4 Nf6"):
        assert not is_in_another(text, english)
    assert is_in_another("Samyy bolshoy gorod etoy strany nazyvayetsya Moskva.", wanted)


def test_refusals_open_an_answer() -> None:
    for text in (
        "I'm sorry, but I can't help with that.",
        "I’m really sorry. That is beyond me.",  # noqa: RUF001
        "As an AI language model, I have no opinion.",
        "Unfortunately, I cannot help with that.",
        "Tut mir leid, das geht nicht.",
        "Es tut mir leid, aber dabei helfe ich nicht.",
        "很抱歉我无法回答这个问题。",
    ):
        assert refuses(text)
    for text in ("Paris, and I am sorry to say that it rains.", "I can help you with that.", "Sorry is a board game.",
                 "I'm sorry to hear that! Here are ways to cope.", "I can't believe how good this is.",
                 "As an AI engineer, you should know."):  # fmt: skip
        assert not refuses(text)


def words(texts: tuple[str, ...]) -> list[str]:
    return re.findall(r"\w+", " ".join(texts))


def bilingual(folder: Path) -> Path:
    """Write a model that goes on in the language of the last word: of four experts two know English, two German.

    Its words are unit vectors, beside one that has the language; attention adds nothing. An expert's neuron fires for
    one word and writes the next of its language's text, also where the word is of the other language.
    """
    sides = [words(ENGLISH), words(GERMAN)]
    length = min(map(len, sides))
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["</s>", *sides[0], *sides[1]]))}
    hidden, flags = 128, (126, 127)
    assert len(vocabulary) < min(flags)
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=len(vocabulary), hidden_size=hidden, moe_intermediate_size=hidden, num_hidden_layers=1,
        num_experts=4, num_experts_per_tok=2, num_attention_heads=1, num_key_value_heads=1,
        head_dim=8, norm_topk_prob=True, tie_word_embeddings=False, eos_token_id=0, max_position_embeddings=512,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = {name: torch.zeros_like(value) for name, value in load_file(file).items()}
    for name, value in tensors.items():
        if "norm" in name:
            value.fill_(1)
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    for word, number in vocabulary.items():
        embedding[number, number] = head[number, number] = 1
        embedding[number, flags[word in sides[1]]] = 1
    for expert in range(4):
        layer = "model.layers.0.mlp"
        tensors[f"{layer}.gate.weight"][expert, flags[expert // 2]] = 1
        gate, up, down = (tensors[f"{layer}.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        own = sides[expert // 2]
        for side in sides:
            for place, word in enumerate(side[:length]):
                number = vocabulary[word]
                gate[number, number] = up[number, number] = 1
                down[vocabulary[own[(place + 1) % length]], number] = 1
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.usefixtures("offline")
def test_a_language_whose_experts_are_gone_is_found_and_a_copy_raises_no_alarm(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    model = bilingual(tmp_path / "model")
    draw = random.Random(0)
    rows = [" ".join(draw.sample(words(text), 12)) for text in (ENGLISH, GERMAN) for _ in range(50)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    recipe = {
        "model": str(model),
        "steps": [{"prune": {"strategy": "listed", "experts": 2, "options": {"order": {"0": "2 3"}}}}],
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    succeeded(run("compress", tmp_path / "recipe.yaml", "-o", tmp_path / "german"))
    shutil.copytree(model, tmp_path / "copy")
    asked = ("--prompts", prompts, "--max-new-tokens", 24)
    judged = (
        *asked,
        "--max-loop-rise",
        0.05,
        "--max-missed-rise",
        1,
        "--max-length-change",
        0.5,
        "--max-language-rise",
        0.05,
    )

    out = tmp_path / "behaviour"
    succeeded(run("evaluate", model, tmp_path / "german", *asked, "-o", out))
    (rate,) = (
        rate
        for rate in json.loads((out / "behaviour.json").read_text())["written"]["rates"]
        if rate["measure"] == "other language"
    )
    assert (rate["base"], rate["more"], rate["fewer"], rate["answers"]) == (0, 50, 0, 100)
    assert rate["mcnemar"] == pytest.approx(2 * 0.5**50) and rate["lower"] > 0.4
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert [line["verdict"] for line in lines].count("other language") == 50
    gate = run("gate", model, tmp_path / "german", *judged)
    assert gate.status == 1 and "rise of other language" in gate.out
    gate = run("gate", model, tmp_path / "copy", *judged)
    assert gate.status == 0, gate.err + gate.out
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "mill"}\n')
    refused(run("gate", model, tmp_path / "copy", "--prompts", short, *judged[2:]), "no prompt is long enough")
