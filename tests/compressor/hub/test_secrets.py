import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.data.demo import demo_checkpoint
from compressor.errors import CompressionError
from compressor.hub import secrets
from compressor.hub.push import push
from compressor.hub.secrets import kind_of_secret, refuse_secrets
from tests.support import small
from tests.support.hub import Hub
from tests.support.hub_pushes import CANARY, REPOSITORY, refusal, sent, shards

MIXED = "a1B2c3D4e5F6g7H8i9J0"
BASE64 = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC"
SECRETS = {  # none of them was ever given out
    "hub": ("hf_" + "a1B2c3" * 6, "access token of the Hub"),
    "hub, the shortest": ("hf_" + "Z" * 30, "access token of the Hub"),
    "hub, of a login": ("hf_oauth_" + "eyJ.a~b-c_" * 3, "access token of the Hub"),
    "anthropic": ("sk-ant-api03-" + MIXED * 4 + "-_AA", "Anthropic"),
    "openai": ("sk-proj-" + MIXED + "-_" + MIXED * 2, "OpenAI"),
    "openai of old": ("sk-" + MIXED + "T3BlbkFJ" + MIXED, "OpenAI"),
    "openrouter": ("sk-or-v1-" + "0123abcd" * 8, "OpenAI or the like"),
    "aws": ("AKIA" + "IOSFODNN7Q2345WZ"[:16].replace("8", "2"), "access key of AWS"),
    "aws, passing": ("ASIA" + "QWERTYUIOPASDF23", "access key of AWS"),
    "aws, secret": ("aws_secret_access_key = " + "wJal/XUt+FEMI" * 3 + "K", "secret key of AWS"),
    "aws, in a program": ('awsSecretAccessKey: "' + "wJal/XUt+FEMI" * 3 + 'K"', "secret key of AWS"),
    "github": ("ghp_" + "a1B2c3" * 6, "GitHub"),
    "github, fine": ("github_pat_" + MIXED + "ab_" + MIXED * 3, "GitHub"),
    "gitlab": ("glpat-" + MIXED, "GitLab"),
    "google": ("AIza" + "SyA1-b2_C3d4E5f6G7h8I9j0K1l2M3n4O5p", "Google"),
    "google, a secret": ("GOCSPX-" + "a1B2c3-" * 4, "Google"),
    "google, for an hour": ("ya29." + MIXED * 4, "Google"),
    "slack": ("xoxb-1234567890-1234567890123-" + MIXED, "Slack"),
    "slack, an address": ("https://hooks.slack.com/services/T01234567/B01234567/" + MIXED, "Slack"),
    "stripe": ("sk_live_" + MIXED, "Stripe"),
    "npm": ("npm_" + "a1B2c3" * 6, "package registry"),
    "pypi": ("pypi-AgEIcHlwaS5vcmc" + MIXED * 4, "package registry"),
    "groq": ("gsk_" + MIXED * 3, "provider of models"),
    "replicate": ("r8_" + "a1B2c3" * 6 + "x", "provider of models"),
    "jwt": ("eyJ" + MIXED + ".eyJ" + MIXED + "." + MIXED, "signed token"),
    "pem": (f"-----BEGIN PRIVATE KEY-----\n{BASE64}\n-----END PRIVATE KEY-----", "private key"),
    "rsa, Windows": (f"-----BEGIN RSA PRIVATE KEY-----\r\n{BASE64}\r\n", "private key"),
    "rsa, locked": (f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: A\n\n{BASE64}", "private key"),
    "ssh": (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{BASE64}", "private key"),
    "pgp": (f"-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: 1\n\n{BASE64}", "private key"),
    "age": ("AGE-SECRET-KEY-1" + "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L" + "QPZRY9X8GF2TVDW0S3JN54KHCE", "private key"),
}
SPELLINGS: dict[str, Callable[[str], bytes]] = {
    "plainly": str.encode,
    "in a sentence": lambda secret: f"The key is ({secret}).".encode(),
    "as UTF-16": lambda secret: secret.encode("utf-16"),
    "in JSON": lambda secret: json.dumps({"key": secret}).encode(),
    "in JSON with every letter escaped": lambda secret: f'["{escaped(secret)}"]'.encode(),
    "after a word's mark, in ASCII": lambda secret: json.dumps([f"\u0120{secret}"]).encode(),
    "in JSON in JSON": lambda secret: json.dumps(json.dumps({"key": f"\u0120{secret}\u0120"})).encode(),
    "in escaped JSON in JSON": lambda secret: json.dumps(f'["{escaped(secret)}"]').encode(),
    "in Markdown with every mark escaped": lambda secret: re.sub(r"([^A-Za-z0-9])", r"\\\1", secret).encode(),
    "with escaped slashes": lambda secret: json.dumps(secret).replace("/", "\\/").encode(),
    "in YAML": lambda secret: ('key: "' + "".join(f"\\x{ord(letter):02x}" for letter in secret) + '"').encode(),
    "in XML": lambda secret: "".join(f"&#{ord(letter)};" for letter in secret).encode(),
    "in XML by sixteen": lambda secret: "".join(f"&#x{ord(letter):x};" for letter in secret).encode(),
    "in an address": lambda secret: "".join(f"%{ord(letter):02X}" for letter in secret).encode(),
    "among bytes": lambda secret: b"\xff\x89" + secret.encode() + b"\xfe\x00",
}


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(letter):04x}" for letter in text)


@pytest.mark.parametrize("name", SECRETS)
def test_every_kind_is_known_in_every_spelling(name: str) -> None:
    secret, kind = SECRETS[name]
    for how, spell in SPELLINGS.items():
        assert kind in (kind_of_secret(spell(secret)) or ""), how


NO_SECRETS = (
    "hf_hub_download, hf_" + "a" * 29 + " and hf_short; task-" + MIXED * 3,
    "sk-learn, sk-folding-cube-and-other-spinners-of-a-page, ghp_short, AKIA, AKIAlower2345lower23, xoxb-1-2",
    "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
    f"-----BEGIN CERTIFICATE-----\n{BASE64}\n-----END CERTIFICATE-----\n-----BEGIN PUBLIC KEY-----\n{BASE64}",
    "aws_secret_access_key = your key; secret_key: " + "0" * 39,
    "XAKIAQWERTYUIOPASDF23 AKIAQWERTYUIOPASDF234 eyJhbGciOiJIUzI1NiJ9.eyJh",
    "AIza" + "a" * 40 + " 0hf_" + "a1B2c3" * 6,  # longer ones, as parts of base64
)


@pytest.mark.parametrize("text", NO_SECRETS)
def test_what_only_begins_alike_is_no_secret(text: str) -> None:
    assert kind_of_secret(text.encode()) is None
    assert kind_of_secret(json.dumps(text).encode()) is None


@given(st.binary(max_size=400), st.sampled_from([b"", b"\\", b"\\u", b"&#", b"%", b"-----BEGIN RSA PRIVATE KEY-----"]))
def test_any_bytes_can_be_read(data: bytes, mark: bytes) -> None:
    assert kind_of_secret(data + mark + data) is None


@pytest.mark.parametrize("offset", [-40, -20, -1, 0, 1])
@pytest.mark.parametrize("spell", [str.encode, lambda secret: escaped(secret).encode()])
def test_a_secret_across_two_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, spell: Any) -> None:
    monkeypatch.setattr(secrets, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(secrets, "OVERLAP_BYTES", 1000)
    path = tmp_path / "vocab.txt"
    path.write_bytes(b" " * (10_000 + offset) + spell(CANARY) + b" " * 9000)
    with pytest.raises(CompressionError, match="holds what looks like an access token of the Hub"):
        refuse_secrets({"vocab.txt": path}, {})
    refuse_secrets({"model.safetensors": path}, {"model.safetensors": 9000})


FILES = (
    "merges.bpe", "bpe.codes", "words.tiktoken", "source.spm", "spiece.model", "notes.txt", "README.md", "LICENSE",
    "chat_template.jinja", "additional_chat_templates/x.jinja", "NOTICE.html", "preprocessor_config.json",
)  # fmt: skip


def test_a_file_that_holds_a_secret_is_refused_by_name(folder: Path, hub: Hub) -> None:
    for number, name in enumerate(FILES):
        secret, kind = [*SECRETS.values()][number % len(SECRETS)]
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(json.dumps({"x": secret}).encode())
        said = refusal(folder, hub, "holds what looks like")
        assert said.startswith(name) and kind in said and secret[:12] not in said
        (folder / name).unlink()
    assert hub.requests == []


def test_the_token_in_use_is_known(folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "the-very-token-in-use")
    (folder / "chat_template.jinja").write_bytes(b"{# the-very-token-in-use #}")
    assert "in-use" not in refusal(folder, hub, "^chat_template.jinja holds what looks like an access token of the Hub")


@pytest.mark.parametrize("secret", [CANARY, SECRETS["aws"][0], SECRETS["rsa, locked"][0]])
def test_the_metadata_and_names_of_tensors_are_read(folder: Path, hub: Hub, secret: str) -> None:
    shard = shards(folder)[1]
    small.edit_header(shard, lambda header: header.update(__metadata__={"format": "pt", "note": secret}))
    assert refusal(folder, hub, "holds what looks like").startswith(shard.name)


def test_a_picture_that_the_card_shows_is_read(folder: Path, hub: Hub) -> None:
    (folder / "README.md").write_text("![](plot.svg)")
    (folder / "plot.svg").write_text(f"<svg><text>{CANARY}</text></svg>")
    assert refusal(folder, hub, "holds what looks like").startswith("plot.svg")


def test_a_file_named_like_a_secret(folder: Path, hub: Hub) -> None:
    secret = SECRETS["github"][0]
    (folder / f"{secret}.json").write_text("{}")
    assert secret[:8] not in refusal(folder, hub, "is named like a token of GitHub")


def test_tensors_that_look_like_a_secret_are_weights(folder: Path, hub: Hub) -> None:
    data = bytearray(shards(folder)[2].read_bytes())
    data[-len(CANARY) :] = CANARY.encode()
    shards(folder)[2].write_bytes(data)
    (folder / "SHA256SUMS").unlink()
    push(folder, REPOSITORY, dry_run=True)


def test_the_demo_is_pushed(hub: Hub) -> None:
    with demo_checkpoint() as demo:
        assert "tokenizer.json" in sent(push(demo, REPOSITORY, dry_run=True))
