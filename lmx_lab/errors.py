"""Define every error that the package raises on purpose.

::

    LabError
      CallerError
        InvalidRequestError
          ArgumentError
          BodyTooLargeError
          ContextLengthError
          SlowRequestError
          UnclearModelError
          UnusableModelError
        ModelNotFoundError
        UnauthorizedError
        HostForbiddenError
        OriginForbiddenError
        AdminForbiddenError
        NotFoundError
          SessionNotFoundError
          TurnNotFoundError
          PermissionNotFoundError
          McpServerNotFoundError
        ConflictError
          TurnInProgressError
          IdempotencyConflictError
          AlreadyResolvedError
          RevisionConflictError
          McpServerExistsError
        GoneError
          CursorExpiredError
          PermissionExpiredError
          RequestStoppedError
      UnavailableError
        NotLoadedError
          OtherModelLoadedError
        ModelBusyError
        QueueFullError
        StorageFullError
        DownloadError
        UnreachableError
          ConnectionLostError
          WrongServerError
        UpstreamUnreachableError
        StoppingError
        BatchStoppedError
      EngineError
        GenerationTimeoutError
        OutOfMemoryError
        EngineDeadError
      TurnError
        DaemonRestartedError
        TurnTimeoutError
      HostingError
        PortTakenError
        DaemonRunningError
      MissingPackageError

Programs read ``code``, which never changes after its release; a class without its own code inherits that of its parent.
The message is for people: it names the value, the limit and the next step. HTTP statuses are in
``lmx_lab.http.errors``, because only servers need them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Self


class LabError(Exception):
    """The base class of all errors that the package raises on purpose.

    Args:
        message: The wrong value, the limit, and the next step.
        param: The field, argument or option that was wrong.
        retry_after_s: Time in seconds after which the same request can succeed.
    """

    code: ClassVar[str] = "internal-error"

    def __init_subclass__(cls, code: str | None = None) -> None:
        """Set the code of a class that has its own."""
        super().__init_subclass__()
        if code is not None:
            cls.code, ERROR_CLASSES[code] = code, cls

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


ERROR_CLASSES: dict[str, type[LabError]] = {LabError.code: LabError}
"""The class to raise for a code from a server's answer."""


# The request is wrong: sending it again does not help.


class CallerError(LabError, code="invalid-request"):
    """The request is wrong; sending it again does not help."""


# The same code as the parent's, stated again: clients raise this class for it.
class InvalidRequestError(CallerError, code="invalid-request"):
    """The body is malformed, or a value is missing, of a wrong type or not allowed."""


class ArgumentError(InvalidRequestError, TypeError):
    """A function was called with an argument that it does not have, or without one that it needs."""

    @classmethod
    def unknown(cls, function: str, name: str, known: Iterable[str]) -> ArgumentError:
        """Return the error for a keyword that a function does not have."""
        names = list(known)
        remedy = did_you_mean(name, names) or f"; its arguments are {', '.join(names)}"
        return cls(f"{function}() has no argument {name!r:.80}{remedy}", param=name)


class BodyTooLargeError(InvalidRequestError, code="body-too-large"):
    """The request body is larger than the limit."""


class SlowRequestError(InvalidRequestError):
    """The body of the request arrived too slowly."""


# The spelling of OpenAI's API, because clients compare it.
class ContextLengthError(InvalidRequestError, code="context_length_exceeded"):
    """The prompt is longer than the model's context."""


class UnclearModelError(InvalidRequestError):
    """No model was named, and the server lists several."""


class UnusableModelError(InvalidRequestError):
    """The files are not a model or are damaged, or no engine on this machine can run them."""


class ModelNotFoundError(CallerError, code="model-not-found"):
    """The model is not on the disk, and was not downloaded: downloads are off, or no source has it."""


class UnauthorizedError(CallerError, code="unauthorized"):
    """The server needs a key, which was not given or is wrong."""


class HostForbiddenError(CallerError, code="host-forbidden"):
    """The Host header is not in the allow-list."""


class OriginForbiddenError(CallerError, code="origin-forbidden"):
    """The Origin header belongs to a web page that is not allowed to call the server."""


class AdminForbiddenError(CallerError, code="admin-forbidden"):
    """Only callers on the server's machine may load and unload models, and steer requests."""


class NotFoundError(CallerError, code="not-found"):
    """Nothing has this id. There is a subclass for each kind of object."""


class SessionNotFoundError(NotFoundError, code="session-not-found"):
    """No session has this id."""


class TurnNotFoundError(NotFoundError, code="turn-not-found"):
    """The session has no turn of this id."""


class PermissionNotFoundError(NotFoundError, code="permission-not-found"):
    """No permission has this id."""


class McpServerNotFoundError(NotFoundError, code="mcp-server-not-found"):
    """No MCP server has this name."""


class ConflictError(CallerError, code="conflict"):
    """The object's current state does not allow the request; the message names the state."""


class TurnInProgressError(ConflictError, code="turn-in-progress"):
    """The session is running a turn, and the request was not to wait for its end."""


class IdempotencyConflictError(ConflictError, code="idempotency-conflict"):
    """The id was used before, for a request with another body."""


class AlreadyResolvedError(ConflictError, code="already-resolved"):
    """Another client has already decided on the permission."""


class RevisionConflictError(ConflictError, code="revision-conflict"):
    """Another client has changed the object since it was read."""


class McpServerExistsError(ConflictError, code="mcp-server-exists"):
    """An MCP server of this name exists."""


class GoneError(CallerError, code="gone"):
    """The object existed and is no longer available."""


class CursorExpiredError(GoneError, code="cursor-expired"):
    """The events after this cursor are not in the daemon's log.

    Args:
        reason: ``pruned``: they were deleted. ``ahead``: the log has not reached the cursor. ``other-stream``: the
            cursor is from the log of another database.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Literal["pruned", "ahead", "other-stream"] = "pruned",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.reason: Literal["pruned", "ahead", "other-stream"] = reason


class PermissionExpiredError(GoneError, code="permission-expired"):
    """The time for a decision on the permission is over, or its turn has ended."""


class RequestStoppedError(GoneError, code="request-stopped"):
    """The request was stopped on the server while it waited or ran."""

    def __init__(
        self,
        message: str = "the request was stopped on the server; send it again if its answer is still needed",
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


# The request is right, but cannot be served now.


class UnavailableError(LabError):
    """The request is right but cannot be served now; the message states when, or what must happen first."""


class NotLoadedError(UnavailableError, code="no-model-loaded"):
    """No model is loaded, or the loaded model is about to be unloaded."""


class OtherModelLoadedError(NotLoadedError):
    """A model other than the requested one is loaded."""


class ModelBusyError(UnavailableError, code="model-busy"):
    """Another model is being loaded."""


class QueueFullError(UnavailableError, code="queue-full"):
    """Too many requests are waiting."""


class StorageFullError(UnavailableError, code="storage-full"):
    """The disk has no room for the download or for the daemon's log."""


class DownloadError(UnavailableError, code="download-failed"):
    """The hub or the package index did not deliver a file."""


class UnreachableError(UnavailableError, code="unreachable"):
    """No LMX Lab server answers at the address, or its answer is not valid."""


class ConnectionLostError(UnreachableError, code="connection-lost"):
    """The connection was lost before the answer was complete."""


class WrongServerError(UnreachableError):
    """Another program answers at the address, so repeating the request does not help."""


class UpstreamUnreachableError(UnavailableError, code="upstream-unreachable"):
    """The daemon cannot reach its model server."""


class StoppingError(UnavailableError, code="daemon-stopping"):
    """The daemon is stopping."""


class BatchStoppedError(UnavailableError):
    """A batch ended before its last row, because the server cannot answer further ones."""

    frame: Any = None
    """The table with the answers so far; None if they were returned one by one."""


# A generation, a turn or a server has failed.


class EngineError(LabError):
    """The generation has failed; the engine can be used for other requests."""


class GenerationTimeoutError(EngineError, code="lmx-timeout"):
    """The request has reached its time limit."""

    @classmethod
    def after(cls, limit_s: float, next_step: str = "send a shorter request") -> Self:
        """Return the error of a request that did not finish within the time limit."""
        return cls(
            f"the request did not finish within its time limit of {limit_s:g} s (request_timeout_s); {next_step}"
        )


class OutOfMemoryError(EngineError, code="oom-unloaded"):
    """There is not enough memory: the model was not loaded, or was unloaded."""


class EngineDeadError(EngineError):
    """The engine's thread or process has ended. Loading a model starts it again."""


class TurnError(LabError, code="turn-failed"):
    """The turn has ended without an answer."""


class DaemonRestartedError(TurnError, code="daemon-restarted"):
    """The daemon ended while the turn was running."""


class TurnTimeoutError(TurnError, code="turn-timeout"):
    """The turn has reached its time limit."""


class HostingError(LabError, code="start-failed"):
    """A server, client or stream of this process cannot be started or used; the message contains the reason."""


class PortTakenError(HostingError, code="port-taken"):
    """Another program uses the port that was requested."""


class DaemonRunningError(HostingError, code="daemon-running"):
    """A daemon is already running in this home folder."""


class MissingPackageError(LabError, ImportError, code="package-missing"):
    """An optional package is not installed; the message contains the command that installs it."""


UNKNOWN_FIELD = "is not a field of this request, or not supported by this version"
OTHER_NAMES = {
    "schema": "response_format",
    "json_schema": "response_format",
    "format": "response_format",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "stop_sequences": "stop",
    "system": "messages",
    "regex": "guided_regex",
    "ebnf": "grammar",
    "random_seed": "seed",
    "min_new_tokens": "min_tokens",
    "thinking_budget": "thinking_token_budget",
    "thinking_budget_tokens": "thinking_token_budget",
    "think": "enable_thinking",
    "output_dimension": "dimensions",
    "output_dtype": "encoding_format",
    "embedding_type": "encoding_format",
    "truncation": "truncate",
    "top_k": "top_n",
}
"""Names of arguments in other libraries and servers that are not similar to the names here."""


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts, as in ``1 token`` and ``1,200 tokens``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(count: float) -> str:
    """Return a size as text, such as ``270 MB``; 1 GB is 10^9 bytes."""
    for unit, size, digits in (("GB", 10**9, 2), ("MB", 10**6, 0), ("kB", 10**3, 0)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return counted(round(count), "byte")


def first_names(names: Sequence[str], most: int) -> str:
    """Return at most ``most`` names as a text, followed by the number of other names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def newer_version(version: object, latest: int) -> str:
    """Return the predicate of an error message about a file that a newer version of the package wrote.

    Args:
        version: The version of the format in the file.
        latest: The newest version of the format that this package reads.
    """
    versions = f"its version is {version!s:.20}, and this version reads {latest}"
    return f"was written by a newer version of LMX Lab ({versions}: update lmx-lab)"


def did_you_mean(name: str, known: Iterable[str], *, similarity: float = 0.6) -> str:
    """Return a phrase for an error message that suggests the most similar known name; empty if none is similar.

    Args:
        similarity: The lowest similarity of a name that is suggested, from 0 to 1 (equal names).
    """
    names = list(known)
    other = OTHER_NAMES.get(name)
    # In a folder that exists, only names of files are compared: a long folder would make all of them similar.
    folder = name[: name.rfind("/") + 1]
    folder = folder if any(each.startswith(folder) for each in names) else ""

    def spelling(text: str) -> str:
        # Truncated, because the name may come from a request, and the time grows with the square of its length. The end
        # of a path says more than its beginning.
        text = text.removeprefix(folder).removesuffix(".gguf") if folder else text
        return text[-80:].casefold()

    by_spelling = {spelling(each): each for each in reversed(names)}
    similar = difflib.get_close_matches(spelling(name), by_spelling, n=1, cutoff=similarity)
    suggested = other if other in names else by_spelling[similar[0]] if similar else None
    return f"; did you mean {suggested!r}?" if suggested else ""
