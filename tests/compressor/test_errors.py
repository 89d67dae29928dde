"""Tokens of the Hub never stay in a message, whole or cut off, and nothing else is taken out of it."""

from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import reason_of, without_tokens

TOKENS = st.one_of(
    st.text("abcXYZ0189", min_size=30, max_size=40).map("hf_{}".format),
    st.text("abcXYZ_-.01", min_size=20, max_size=60).map("hf_oauth_{}".format),
)
PLAIN = st.text(alphabet=st.characters(exclude_categories=["L", "N"]), max_size=20)  # no letter that could join a token


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")


@given(TOKENS, st.sampled_from([" ", "\n", "'", '"', ",", "/"]), st.sampled_from(["Bearer ", "token=", "", "'"]))
def test_what_looks_like_a_token_goes(token: str, after: str, before: str) -> None:
    assert without_tokens(f"said {before}{token}{after}end") == f"said {before}***{after}end"


@given(st.lists(st.one_of(PLAIN, st.sampled_from(["hf_hub_download", "hf_" + "a" * 29, "HF_TOKEN"])), max_size=5))
def test_other_text_stays(parts: list[str]) -> None:
    text = " ".join(parts)
    assert without_tokens(text) == text


@pytest.mark.parametrize("place", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "file"])
def test_the_token_in_use_goes_whatever_it_looks_like(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    if place == "file":
        (tmp_path / "token").write_text("of-another-kind\n")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    else:
        monkeypatch.setenv(place, " of-another-kind\n")
    assert without_tokens("it is of-another-kind.") == "it is ***."


def test_a_placeholder_takes_no_words_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "none")
    assert without_tokens("none of it") == "none of it"


def test_a_message_that_is_cut_off_does_not_keep_half_a_token() -> None:
    token = "hf_" + "Aa1" * 12
    for most in range(10, 60):
        assert "Aa1" not in reason_of(ValueError(f"the server says {token} and more"), most)
