"""The language of answers beside the one that their question asks for, and answers that refuse.

py3langid (Lui and Baldwin, ACL 2012) names languages; docs/how-to/behaviour.md has its errors on
sentences in ten scripts beside those of other libraries. An answer counts as one in another
language if what was asked for is very unlikely, so that an unusual answer is no alarm."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any

from compressor.answers.prompts import Prompt
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.tokenizer import as_part

LETTERS = 15  # that a text has at least, for which ideographs and syllables count as `WIDE`
WIDE = 3
MOST = 4_000  # letters that are looked at
OPENING = 200  # letters of an answer in which a refusal stands
POSSIBLE = 0.1  # of the likeliest language's probability makes another a question's, too
CLEAR = 0.3  # least probability of the likeliest other language
NOTHING = "zxx"  # the label of text without language
UNLIKELY = 0.01  # probability of a question's languages below which an answer is in another
STEM = 3  # letters at the end of a language's name that may differ, as in "на французском"
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|https?://\S+|<[^<>\n]*>", re.DOTALL)
JAPANESE = ("HIRAGANA", "KATAKANA")
SENTENCE = re.compile(r"[.!?:\n。！？：]+")  # noqa: RUF001
REFUSAL = re.compile(
    r"""(?:^|[.!?:\n])\W*(?:(?:unfortunately|no|leider|malheureusement|lamento),?\ )?(?:
    i\W?a?m\ (?:(?:really|so|very|truly)\ )?sorry\b(?!\ (?:to\ hear|for|about|that\ you))
    | i\ apologi[sz]e\b | sorry,?\ (?:but\ )?i\b
    | i\ (?:(?:ca|wo)n\W?t|(?:can|will|could)\ ?not)\b(?!\ (?:believe|recommend|wait|stress|spoil))
    | i\W?a?m\ (?:not\ able|unable)\ to\b | i\ (?:must|have\ to)\ (?:decline|refuse)\b
    | as\ an?\ (?:ai|language\ model)\b(?!\ \w+er\b)
    | (?:es\ )?tut\ mir\ leid\b | ich\ (?:kann|darf|werde)\b[^.]{0,40}\bnicht\b
    | je\ suis\ désolée?\b(?!\ d) | je\ ne\ (?:peux|puis)\ pas\b | désolée?,\ (?:mais\ )?je\b
    | lo\ siento\b(?!\ es) | no\ puedo\b | mi\ dispiace\b | non\ posso\b | desculpe\b
    | não\ posso\b | к\ сожалению,?\ я\b | я\ не\ могу\b )
    | 抱歉 | 对不起 | 我(?:无法|不能) | 申し訳 | お答えできません | 죄송""",
    re.IGNORECASE | re.VERBOSE,
)
# names that CLDR lacks, and codes of languages that py3langid calls otherwise
NAMES = {
    **{"英文": "en", "中文": "zh", "日文": "ja", "法文": "fr", "德文": "de", "韩文": "ko"},
    **{"英訳": "en", "和訳": "ja", "farsi": "fa", "mandarin": "zh", "castilian": "es"},
    **{"flemish": "nl", "nb": "no", "nn": "no", "bokmål": "no", "fil": "tl", "filipino": "tl"},
}
# codes of languages that in a data set of code are C#, Perl, OCaml, ActionScript, PostScript, shell
OF_PROGRAMS = frozenset({"cs", "pl", "ml", "as", "ps", "sh"})


@frozen
class Wanted:
    """Languages (ISO 639-1) in which an answer may be, and the script, unless any will do."""

    languages: frozenset[str]
    script: str | None


@cache
def _identifier() -> Any:
    """Load py3langid's model."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@cache
def _names(language: str) -> dict[str, str]:
    """Return the names of all languages in a language, in small letters, and their codes."""
    from babel import Locale, UnknownLocaleError

    try:
        known = {str(key): str(name) for key, name in Locale(language).languages.items()}
    except UnknownLocaleError:
        return {}
    labels = set(_identifier().labels)
    codes = {key: NAMES.get(key, key.partition("_")[0]) for key in known}
    return {known[key].lower(): code for key, code in codes.items() if code in labels}


def code_of(name: str) -> str | None:
    """Return the language of a code (de, pt-BR, deu) or name (German, Deutsch), or None."""
    from babel.core import get_global

    word = name.strip().lower()
    code = re.split(r"[-_]", word)[0]
    code = NAMES.get(code, get_global("language_aliases").get(code, code))
    labels = _identifier().labels
    if code in labels:
        return str(code)
    own = (label for label in labels if _names(label).get(word) == label)
    return _names("en").get(word) or next(own, None)


def _prose(text: str) -> str:
    """Return a text without code, links and tags, of which every word looks English."""
    return CODE.sub(" ", text[:MOST])


def script_of(text: str) -> str | None:
    """Return the script of most letters, by the first word of their Unicode names; None where there
    are too few of them. Japanese is HIRAGANA, whatever else it has."""
    scripts = Counter[str]()
    for letter in filter(str.isalpha, text):
        wide = unicodedata.east_asian_width(letter) in "WF"
        scripts[unicodedata.name(letter, "?").split()[0]] += WIDE if wide else 1
    if scripts.total() < LETTERS:
        return None
    kana = sum(scripts.pop(name, 0) for name in JAPANESE)
    if kana:
        scripts["HIRAGANA"] = kana + scripts.pop("CJK", 0)
    return scripts.most_common(1)[0][0]


def probabilities(text: str) -> dict[str, float]:
    """Return the probability of each language (ISO 639-1, or -3) that a text is in it."""
    return {language: float(share) for language, share in _identifier().rank(text)}


def wanted_by(prompt: Prompt) -> Wanted | None:
    """Return the languages in which a prompt asks for an answer: the one of its row's `language`,
    or else what may be its own, and those it names in English or its own words. None if it is too
    short. A `language` that may be one of programs only adds to what the prompt asks for."""
    said = (prompt.language or "").strip().lower()
    code = code_of(said) if said else None
    if code is not None and said not in OF_PROGRAMS:
        return Wanted(frozenset({code}), None)
    asked = [""]
    for message in prompt.chat:
        content = message.get("content") or ""
        if message.get("role") in ("system", "developer", "user"):
            parts = map(as_part, [content] if isinstance(content, str) else content)
            asked.append("\n".join(part.get("text") or "" for part in parts))  # pictures have none
    prose = _prose(asked[-1])
    sentences = [part for part in SENTENCE.split(prose) if script_of(part)]
    possible, scripts = set[str](), set[str | None]()
    # a question may quote another language before or after it
    for part in {prose, *sentences[:1], *sentences[-1:]}:
        script = script_of(part)
        if script is not None:
            shares = probabilities(part)
            least = POSSIBLE * max(shares.values())
            possible |= {code for code, share in shares.items() if share >= least} - {NOTHING}
            scripts.add(script)
    if not possible:
        return None
    named = _named_in(" ".join(asked).lower(), possible - {"en"}) | ({code} if code else set())
    alone = len(scripts) == 1 and named <= possible
    return Wanted(frozenset(possible | named), scripts.pop() if alone else None)


def _named_in(text: str, languages: Iterable[str]) -> set[str]:
    """Return the languages that a text in small letters names, in English or one of `languages`."""
    words = set(re.findall(r"\w+", text))
    named = {code for name, code in _names("en").items() if name in words}
    for name, code in NAMES.items():
        is_word = len(name) > STEM and name in words
        if is_word or (not name.isascii() and name in text):
            named.add(code)
    for name, code in chain.from_iterable(_names(each).items() for each in languages):
        if (name[:-STEM] if len(name) > 2 * STEM else name) in text:
            named.add(code)
    return named


def unclear_language() -> CompressionError:
    """Return the error of a limit where no prompt tells a language."""
    return CompressionError(
        "no prompt is long enough to tell its language; name other --prompts, give their rows a "
        "column language, or leave out --max-language-rise"
    )


def is_in_another(text: str, wanted: Wanted) -> bool:
    """Return True if an answer is clearly in another language or script than a prompt asked for."""
    prose = _prose(text)
    script = script_of(prose)
    if script is None:
        return False
    if wanted.script is not None and script != wanted.script:
        return True
    shares = probabilities(prose)
    likely = sum(shares.pop(code) for code in wanted.languages)
    shares.pop(NOTHING, None)
    return likely < UNLIKELY and max(shares.values()) >= CLEAR


def refuses(text: str) -> bool:
    """Return True if an answer opens with words of refusal, in one of ten languages."""
    return REFUSAL.search(text[:OPENING]) is not None
