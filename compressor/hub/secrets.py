"""Secrets that must not get onto the Hub: access tokens, keys of other services and private keys,
in any file.

A pattern asks for a service's own prefix, its alphabet and its length, so that no vocabulary of a
tokenizer has one."""

import html
import io
import re
import sys
import warnings
from collections.abc import Mapping
from urllib.parse import unquote

from compressor.errors import TOKEN, CompressionError, tokens_in_use
from compressor.hub.repository import Content

CHUNK_BYTES = 2**22  # of a file in memory at once
OVERLAP_BYTES = 2**16  # of the chunk before: longer than any secret, however it is written
ROUNDS = 3  # JSON as text in JSON as text
HUB = "an access token of the Hub"
KINDS = {  # what it is -> what it looks like
    "an API key of Anthropic": r"sk-ant-[a-z]{2,9}\d\d-[\w-]{20,}",
    "an API key of OpenAI or the like": (
        r"sk-(?:(?:proj|svcacct|admin|or-v1)-[\w-]{40,}|[A-Za-z0-9]{32,})"
    ),
    "an access key of AWS": r"A[KS]IA[A-Z2-7]{16}(?![A-Za-z0-9])",
    "a token of GitHub": r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{50,}",
    "a token of GitLab": r"glpat-[\w-]{20,}",
    "a key of Google": r"(?:AIza[\w-]{35}|GOCSPX-[\w-]{28})(?![\w-])|ya29\.[\w-]{30,}",
    "a token of Slack": (
        r"xox[abceoprs](?:\.xox[a-z])?-[A-Za-z0-9-]{20,}|xapp-\d-[A-Za-z0-9-]{30,}"
        r"|hooks\.slack\.com/(?:services|workflows)/T\w{8,}/\w{8,}/\w{16,}"
    ),
    "a key of Stripe": r"[rs]k_live_[A-Za-z0-9]{20,}",
    "a token of a package registry": r"npm_[A-Za-z0-9]{36}(?!\w)|pypi-AgE[\w-]{50,}",
    "an API key of a provider of models": (
        r"gsk_[A-Za-z0-9]{50,}|xai-[A-Za-z0-9]{60,}|r8_[A-Za-z0-9]{37}(?!\w)"
        r"|nvapi-[\w-]{60,}|wandb_v1_\w{60,}"
    ),
    "a signed token (JWT)": r"eyJ[\w-]{15,}\.eyJ[\w-]{15,}\.[\w-]{20,}",
    "a private key": (
        r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:\s{0,9}[\w-]{1,40}: [^\n]{0,200}\n){0,9}"
        r"\s{0,9}[A-Za-z0-9+/]{16}|PuTTY-User-Key-File-\d:|AGE-SECRET-KEY-1[0-9A-Z]{58}"
    ),
    HUB: TOKEN.pattern,
    # which has no beginning of its own, but a name before it
    "a secret key of AWS": (
        r"(?i:[a-z]{0,20}secret_?(?:access_?)?key)[\"']?\s{0,9}[=:]"
        r"\s{0,9}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"
    ),
}
SECRET = re.compile(
    rf"(?<![A-Za-z0-9])(?:{'|'.join(f'({shape})' for shape in KINDS.values())})".encode()
)
MARKDOWN_ESCAPE = re.compile(rb"\\([^A-Za-z0-9\\])")


def refuse_secrets(files: Mapping[str, Content], prefixes: Mapping[str, int]) -> None:
    """Refuse a file that holds what looks like a secret, or the Hub's token in use; it names the
    file and the kind.

    Every file is read, as it is and with its escapes resolved, but of those in `prefixes` only so
    many first bytes."""
    for name, content in files.items():
        kind = kind_of_secret(name.encode(errors="replace"))
        if kind:
            raise CompressionError(
                f"a file whose name begins with {name[:3]!r} is named like {kind}, so nothing was "
                "pushed; rename it"
            )
        remaining = prefixes.get(name, sys.maxsize)
        last = b""
        with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream:
            while True:
                chunk = stream.read(min(remaining, CHUNK_BYTES))
                if not chunk:
                    break
                kind = kind_of_secret(last + chunk)
                if kind:
                    raise CompressionError(
                        f"{name} holds what looks like {kind}, so nothing was pushed; take it out, "
                        "and revoke it if anybody else may have seen it"
                    )
                last = chunk[-OVERLAP_BYTES:]
                remaining -= len(chunk)


def kind_of_secret(data: bytes) -> str | None:
    """Return the kind of secret in bytes, plain or behind escapes of JSON, YAML, XML or addresses;
    None if none."""
    data = data.replace(b"\0", b"")  # as in UTF-16
    in_use = [token.encode() for token in tokens_in_use()]
    for _ in range(ROUNDS + 1):
        if any(token in data for token in in_use):
            return HUB
        match = SECRET.search(data)
        if match:
            return list(KINDS)[(match.lastindex or 1) - 1]
        # the escapes of JSON, YAML, addresses and XML; a letter beyond ASCII, which no secret has,
        # becomes '?'
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that there are not
            text = MARKDOWN_ESCAPE.sub(rb"\1", data).decode("unicode_escape", "replace")
        plain = html.unescape(unquote(text)).encode("ascii", "replace")
        if plain == data:
            break
        data = plain
    return None
