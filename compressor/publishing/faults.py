"""What went wrong between here and the Hub, as one sentence with its remedy and without any token."""

import re
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from compressor.errors import CompressionError, reason_of

P = ParamSpec("P")
R = TypeVar("R")

AGAIN = "then run the same command again, which goes on where it stopped"
ROOM = re.compile(r"quota|storage|upgrade", re.IGNORECASE)  # how a refusal for want of room reads
MOST = 160  # letters of what the Hub itself says
REMEDIES = {  # by status: what it means, and what helps
    401: ("the Hub does not accept the login", "log in with `hf auth login` and a token that may write"),
    403: ("you may not write there", "ask its owner for write permission, or log in with a token that has it"),
    404: ("it is not there or not visible to you", "check the name and who is logged in (`hf auth whoami`)"),
    409: ("the Hub is busy with another change of it", "wait for that to end"),
    412: ("somebody else has committed to it meanwhile", "look at their commit"),
    413: ("the Hub takes no commit of this size", "make the shards smaller"),
    429: ("the Hub takes no more requests for now", "wait some minutes"),
}
NO_ROOM = ("there is no room left on the Hub", "free some storage there or choose a larger plan")
OWN_TROUBLE = ("the Hub has trouble of its own", "wait a while")
REFUSED = ("the Hub refuses it", "mend what it names")
BROKEN = ("the connection to the Hub broke", "check the network")
OTHER = ("pushing failed", "mend what it names")


def asked(repo_id: str, function: Callable[P, R], /, *args: P.args, **named: P.kwargs) -> R:
    """What the Hub's client answers; its exceptions become a `CompressionError` that does not refer to them.

    A server may echo a token in what it says, and a chained traceback would show it.
    """
    try:
        return function(*args, **named)
    except CompressionError:
        raise
    except Exception as error:
        fault = hub_fault(repo_id, error)
    raise fault


def hub_fault(repo_id: str, error: BaseException) -> CompressionError:
    """The sentence for an exception of the Hub's client."""
    status, said = status_of(error), _reason(error)
    if status == 403 and ROOM.search(said):
        what, remedy = NO_ROOM
    elif status is not None:
        what, remedy = REMEDIES.get(status, OWN_TROUBLE if status >= 500 else REFUSED)
    elif _connection(error):
        what, remedy = BROKEN
    else:
        what, remedy = REFUSED if isinstance(error, ValueError) else OTHER
    shown = f"{status}: {said}" if status is not None else said
    return CompressionError(f"{repo_id}: {what} ({shown}); {remedy}, {AGAIN}")


def status_of(error: BaseException) -> int | None:
    """The status that the Hub answered; None where it did not come to an answer."""
    for each in _chain(error):
        status = getattr(getattr(each, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it was raised from: the client wraps the faults of an upload."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _reason(error: BaseException) -> str:
    """What the Hub says, else what the exception that carries its answer does, else the innermost one."""
    chain = list(_chain(error))
    for each in chain:
        if said := getattr(each, "server_message", None):
            return reason_of(Exception(said), MOST)
    answered = [each for each in chain if getattr(each, "response", None) is not None]
    return reason_of((answered or chain[-1:])[0], MOST)


def _connection(error: BaseException) -> bool:
    """Whether it is a fault of the network rather than an answer."""
    kinds = {kind.__name__ for each in _chain(error) for kind in type(each).__mro__}
    return bool(kinds & {"TransportError", "ConnectionError", "TimeoutError"})
