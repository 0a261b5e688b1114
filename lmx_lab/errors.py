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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Self


class LabError(Exception):
    """The base class of all errors that the package raises on purpose.

    Args:
        message: The wrong value, the limit, and the next step.
        param: The field, argument or option that was wrong.
        retry_after_s: Time in seconds after which the same request can succeed.
    """

    code: ClassVar[str] = "internal-error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


# The request is wrong: sending it again does not help.


class CallerError(LabError):
    """The request is wrong; sending it again does not help."""

    code = "invalid-request"


class InvalidRequestError(CallerError):
    """The body is malformed, or a value is missing, of a wrong type or not allowed."""

    # The same code as the parent's, stated again: clients raise this class for it.
    code = "invalid-request"


class ArgumentError(InvalidRequestError, TypeError):
    """A function was called with an argument that it does not have, or without one that it needs."""

    @classmethod
    def unknown(cls, function: str, name: str, known: Iterable[str]) -> ArgumentError:
        """Return the error for a keyword that a function does not have."""
        names = list(known)
        remedy = did_you_mean(name, names) or f"; its arguments are {', '.join(names)}"
        return cls(f"{function}() has no argument {name!r:.80}{remedy}", param=name)


class BodyTooLargeError(InvalidRequestError):
    """The request body is larger than the limit."""

    code = "body-too-large"


class SlowRequestError(InvalidRequestError):
    """The body of the request arrived too slowly."""


class ContextLengthError(InvalidRequestError):
    """The prompt is longer than the model's context."""

    # The spelling of OpenAI's API, because clients compare it.
    code = "context_length_exceeded"


class UnclearModelError(InvalidRequestError):
    """No model was named, and the server lists several."""


class UnusableModelError(InvalidRequestError):
    """The files are not a model or are damaged, or no engine on this machine can run them."""


class ModelNotFoundError(CallerError):
    """The model is not on the disk, and was not downloaded: downloads are off, or no source has it."""

    code = "model-not-found"


class UnauthorizedError(CallerError):
    """The server needs a key, which was not given or is wrong."""

    code = "unauthorized"


class HostForbiddenError(CallerError):
    """The Host header is not in the allow-list."""

    code = "host-forbidden"


class OriginForbiddenError(CallerError):
    """The Origin header belongs to a web page that is not allowed to call the server."""

    code = "origin-forbidden"


class AdminForbiddenError(CallerError):
    """Only callers on the server's machine may load and unload models, and steer requests."""

    code = "admin-forbidden"


class NotFoundError(CallerError):
    """Nothing has this id. There is a subclass for each kind of object."""

    code = "not-found"


class SessionNotFoundError(NotFoundError):
    """No session has this id."""

    code = "session-not-found"


class TurnNotFoundError(NotFoundError):
    """The session has no turn of this id."""

    code = "turn-not-found"


class PermissionNotFoundError(NotFoundError):
    """No permission has this id."""

    code = "permission-not-found"


class McpServerNotFoundError(NotFoundError):
    """No MCP server has this name."""

    code = "mcp-server-not-found"


class ConflictError(CallerError):
    """The object's current state does not allow the request; the message names the state."""

    code = "conflict"


class TurnInProgressError(ConflictError):
    """The session is running a turn, and the request was not to wait for its end."""

    code = "turn-in-progress"


class IdempotencyConflictError(ConflictError):
    """The id was used before, for a request with another body."""

    code = "idempotency-conflict"


class AlreadyResolvedError(ConflictError):
    """Another client has already decided on the permission."""

    code = "already-resolved"


class RevisionConflictError(ConflictError):
    """Another client has changed the object since it was read."""

    code = "revision-conflict"


class McpServerExistsError(ConflictError):
    """An MCP server of this name exists."""

    code = "mcp-server-exists"


class GoneError(CallerError):
    """The object existed and is no longer available."""

    code = "gone"


class CursorExpiredError(GoneError):
    """The events after this cursor are not in the daemon's log.

    Args:
        reason: ``pruned``: they were deleted. ``ahead``: the log has not reached the cursor. ``other-stream``: the
            cursor is from the log of another database.
    """

    code = "cursor-expired"

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


class PermissionExpiredError(GoneError):
    """The time for a decision on the permission is over, or its turn has ended."""

    code = "permission-expired"


# The request is right, but cannot be served now.


class UnavailableError(LabError):
    """The request is right but cannot be served now; the message states when, or what must happen first."""


class NotLoadedError(UnavailableError):
    """No model is loaded, or the loaded model is about to be unloaded."""

    code = "no-model-loaded"


class OtherModelLoadedError(NotLoadedError):
    """A model other than the requested one is loaded."""


class ModelBusyError(UnavailableError):
    """Another model is being loaded."""

    code = "model-busy"


class QueueFullError(UnavailableError):
    """Too many requests are waiting."""

    code = "queue-full"


class StorageFullError(UnavailableError):
    """The disk has no room for the download or for the daemon's log."""

    code = "storage-full"


class DownloadError(UnavailableError):
    """The hub or the package index did not deliver a file."""

    code = "download-failed"


class UnreachableError(UnavailableError):
    """No LMX Lab server answers at the address, or its answer is not valid."""

    code = "unreachable"


class ConnectionLostError(UnreachableError):
    """The connection was lost before the answer was complete."""

    code = "connection-lost"


class WrongServerError(UnreachableError):
    """Another program answers at the address, so repeating the request does not help."""


class UpstreamUnreachableError(UnavailableError):
    """The daemon cannot reach its model server."""

    code = "upstream-unreachable"


class StoppingError(UnavailableError):
    """The daemon is stopping."""

    code = "daemon-stopping"


class BatchStoppedError(UnavailableError):
    """A batch ended before its last row, because the server cannot answer further ones."""

    frame: Any = None
    """The table with the answers so far; None if they were returned one by one."""


# A generation, a turn or a server has failed.


class EngineError(LabError):
    """The generation has failed; the engine can be used for other requests."""


class GenerationTimeoutError(EngineError):
    """The request has reached its time limit."""

    code = "lmx-timeout"

    @classmethod
    def after(cls, limit_s: float, next_step: str = "send a shorter request") -> Self:
        """Return the error of a request that did not finish within the time limit."""
        return cls(
            f"the request did not finish within its time limit of {limit_s:g} s (request_timeout_s); {next_step}"
        )


class OutOfMemoryError(EngineError):
    """There is not enough memory: the model was not loaded, or was unloaded."""

    code = "oom-unloaded"


class EngineDeadError(EngineError):
    """The engine's thread or process has ended. Loading a model starts it again."""


class TurnError(LabError):
    """The turn has ended without an answer."""

    code = "turn-failed"


class DaemonRestartedError(TurnError):
    """The daemon ended while the turn was running."""

    code = "daemon-restarted"


class TurnTimeoutError(TurnError):
    """The turn has reached its time limit."""

    code = "turn-timeout"


class HostingError(LabError):
    """A server, client or stream of this process cannot be started or used; the message contains the reason."""

    code = "start-failed"


class PortTakenError(HostingError):
    """Another program uses the port that was requested."""

    code = "port-taken"


class DaemonRunningError(HostingError):
    """A daemon is already running in this home folder."""

    code = "daemon-running"


class MissingPackageError(LabError, ImportError):
    """An optional package is not installed; the message contains the command that installs it."""

    code = "package-missing"


def _with_subclasses(kind: type[LabError]) -> Iterator[type[LabError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _with_subclasses(child)


OTHER_NAMES = {
    "schema": "response_format",
    "json_schema": "response_format",
    "format": "response_format",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "stop_sequences": "stop",
    "system": "messages",
}
"""Names of arguments in other libraries that are not similar to the names here."""


def first_names(names: Sequence[str], most: int) -> str:
    """Return at most ``most`` names as a text, which ends with an ellipsis if there are more."""
    return ", ".join([*names[:most], *(["…"] if len(names) > most else [])])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a phrase for an error message that suggests the most similar known name; empty if none is similar."""
    # Truncated, because the name may come from a request, and the time grows with the square of its length. The end of
    # a path says more than its beginning.
    names = list(known)
    other = OTHER_NAMES.get(name)
    by_spelling = {each[-80:].casefold(): each for each in reversed(names)}
    similar = difflib.get_close_matches(name[-80:].casefold(), by_spelling, n=1)
    suggested = other if other in names else by_spelling[similar[0]] if similar else None
    return f"; did you mean {suggested!r}?" if suggested else ""


ERROR_CLASSES: dict[str, type[LabError]] = {
    kind.code: kind for kind in _with_subclasses(LabError) if "code" in vars(kind)
}
"""The class to raise for a code from a server's answer."""
