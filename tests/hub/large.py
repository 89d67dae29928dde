"""Git LFS: the batch that grants addresses, the transfer whole or in parts, and the verification."""

import hashlib
import math
import re
from typing import Any

from tests.hub.answers import Answer, Call, RefusedError, as_json, only, required
from tests.hub.objects import sha256
from tests.hub.state import Grant, Hub, Repository

MIME = "application/vnd.git-lfs+json"
MOST_OBJECTS = 1000


def _actions(hub: Hub, repository: Repository, oid: str, size: int, parts: bool) -> dict[str, Any]:
    """Where to send an object and where to have it verified."""
    part_size = hub.part_size if parts and hub.part_size is not None and size > hub.part_size else None
    signature = hub.grant(repository, oid, size, part_size)
    prefix = "" if repository.kind == "model" else f"{repository.kind}s/"
    address = f"{hub.url}/lfs/{prefix}{repository.name}/{oid}"
    verify = {"href": f"{hub.url}/{prefix}{repository.name}.git/info/lfs/objects/verify"}
    if part_size is None:
        return {"upload": {"href": f"{address}?signature={signature}"}, "verify": verify}
    header = {
        str(number): f"{address}/parts/{number}?signature={signature}"
        for number in range(1, math.ceil(size / part_size) + 1)
    }
    upload = {"href": f"{address}/complete?signature={signature}", "header": {**header, "chunk_size": str(part_size)}}
    return {"upload": upload, "verify": verify}


def batch(hub: Hub, repository: Repository, call: Call) -> Answer:
    """The addresses for the objects that are not stored yet."""
    content = call.json()
    only(content, frozenset({"operation", "transfers", "objects", "hash_algo", "ref"}))
    if call.headers.get("accept") != MIME or call.headers.get("content-type") != MIME:
        raise RefusedError(406, f"A batch is sent and answered as {MIME}")
    if content.get("operation") != "upload" or content.get("hash_algo", "sha256") != "sha256":
        raise RefusedError(422, "Only uploads of objects named by their sha256 are granted")
    transfers = content.get("transfers", ["basic"])
    asked = required(content, "objects", list)
    if len(asked) > MOST_OBJECTS:
        raise RefusedError(413, f"A batch holds at most {MOST_OBJECTS} objects")
    objects = [(required(item, "oid", str), required(item, "size", int)) for item in asked]
    for oid, size in objects:
        if not re.fullmatch("[0-9a-f]{64}", oid) or size < 1:
            raise RefusedError(422, f"{oid} of {size} bytes is no object")
    missing = {oid: size for oid, size in objects if oid not in repository.large}
    hub.demand(sum(missing.values()))
    rows: list[dict[str, Any]] = []
    for oid, size in objects:
        new = {"actions": _actions(hub, repository, oid, size, "multipart" in transfers)} if oid in missing else {}
        rows.append({"oid": oid, "size": size, "authenticated": True, **new})
    in_parts = any("header" in row.get("actions", {}).get("upload", {}) for row in rows)
    return as_json({"transfer": "multipart" if in_parts else "basic", "objects": rows}, headers={"Content-Type": MIME})


def _granted(hub: Hub, call: Call, parts: bool) -> Grant:
    """The grant whose signature the address carries."""
    grant = hub.grants.get(call.query.get("signature", ""))
    if grant is None or grant.oid != call.arguments["oid"] or (grant.part_size is not None) != parts:
        raise RefusedError(403, "The signature of this address is not valid")
    if "authorization" in call.headers:
        raise RefusedError(400, "Only one auth mechanism allowed: this address is signed")
    return grant


def _keep(hub: Hub, grant: Grant, content: bytes) -> None:
    """Store an object that arrived whole."""
    if len(content) != grant.size:
        raise RefusedError(422, f"The object has {len(content)} bytes, not {grant.size}")
    if sha256(content) != grant.oid:
        raise RefusedError(400, f"The content's sha256 is {sha256(content)}, not {grant.oid}")
    grant.repository.store(content, large=True)
    hub.uploaded.append((grant.oid, grant.size))


def put(hub: Hub, call: Call) -> Answer:
    """PUT of a whole object."""
    grant = _granted(hub, call, parts=False)
    _keep(hub, grant, call.body)
    return Answer(200, b"", {"ETag": f'"{hashlib.md5(call.body).hexdigest()}"'})


def put_part(hub: Hub, call: Call) -> Answer:
    """PUT of one part, answered with the tag that the completion must name."""
    grant, number = _granted(hub, call, parts=True), int(call.arguments["number"])
    part_size = grant.part_size or 0
    expected = min(part_size, grant.size - (number - 1) * part_size)
    if number < 1 or len(call.body) != expected:
        raise RefusedError(422, f"Part {number} has {len(call.body)} bytes, not {expected}")
    grant.parts[number] = call.body
    return Answer(200, b"", {"ETag": f'"{hashlib.md5(call.body).hexdigest()}"'})


def complete(hub: Hub, call: Call) -> Answer:
    """The parts put together, if every one of them is there and named in its order."""
    grant, content = _granted(hub, call, parts=True), call.json()
    named = [(required(part, "partNumber", int), required(part, "etag", str)) for part in content.get("parts", [])]
    held = [(number, f'"{hashlib.md5(part).hexdigest()}"') for number, part in sorted(grant.parts.items())]
    if content.get("oid") != grant.oid or named != held:
        raise RefusedError(400, "The parts named are not the parts that arrived")
    _keep(hub, grant, b"".join(part for _, part in sorted(grant.parts.items())))
    return as_json({})


def verify(hub: Hub, repository: Repository, call: Call) -> Answer:
    """Whether an object is stored with its size."""
    content = call.json()
    oid, size = required(content, "oid", str), required(content, "size", int)
    if oid not in repository.large:
        raise RefusedError(404, f"The object {oid} was not uploaded")
    if len(repository.stored[oid]) != size:
        raise RefusedError(422, f"The object {oid} has {len(repository.stored[oid])} bytes, not {size}")
    return as_json({})
