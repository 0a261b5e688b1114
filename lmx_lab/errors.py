"""Every deliberate error of the package.

::

    LabError
      CallerError                  the request is wrong; sending it again will not help
        InvalidRequestError        a malformed body, a missing, mistyped or impossible value
          BodyTooLargeError        more bytes than the limit
          ContextLengthError       prompt longer than the model's context
          UnclearModelError        a server lists several models, and none was named
          UnusableModelError       files that are no model, are damaged, or that no engine here runs
        ModelNotFoundError         the name is not on disk (and may not, or could not, be downloaded)
        UnauthorizedError          a key is needed and was not given, or is wrong
        HostForbiddenError         Host header outside the allow-list
        OriginForbiddenError       Origin header of a page that is not allowed
        AdminForbiddenError        a caller that is not local may not load or unload
        NotFoundError              nothing has this id; one class for each kind of thing
          SessionNotFoundError
          TurnNotFoundError
          PermissionNotFoundError
          McpServerNotFoundError
        ConflictError              not in this state; the message says in which it is
          TurnInProgressError      the session has a turn, and another was not to wait
          IdempotencyConflictError an id was used before, with another body
          AlreadyResolvedError     somebody else has decided
          RevisionConflictError    changed by somebody else since it was read
          McpServerExistsError     the name is taken
        GoneError                  was there
          CursorExpiredError       events after this cursor are no longer, or not yet, in this log
          PermissionExpiredError   nobody decided in time, or the turn has ended
      UnavailableError             right request, wrong moment; the message says when or what first
        NotLoadedError             no model is in memory, or it is about to go
          OtherModelLoadedError    another model than the one asked for
        ModelBusyError             another load is under way
        QueueFullError             too many requests wait
        StorageFullError           the disk cannot take the download
        DownloadError              the hub or the package index failed
        UnreachableError           no server of the lab answers at an address, or not in its words
          ConnectionLostError      it went away in the middle of an answer
          WrongServerError         another program answers there; asking again will not help
        UpstreamUnreachableError   the daemon cannot reach the server of its model
        StoppingError              the daemon is about to end
      EngineError                  this generation failed, the engine is usable
        GenerationTimeoutError     the request's deadline passed
        OutOfMemoryError           the model was unloaded, or refused, for lack of memory
        EngineDeadError            what computes is gone; only a load helps
      TurnError                    a turn ended before its answer did
        DaemonRestartedError       the daemon ended while the turn ran
        TurnTimeoutError           the turn took longer than it may
      HostingError                 a server could not be started where it was asked to run
        PortTakenError             the explicit port is in use
        DaemonRunningError         this home has a daemon already

``code`` is what programs read: it never changes once released. The message is for people: it names the value, the limit
and the next step. HTTP statuses live in ``lmx_lab.http.error_bodies``.
"""

from __future__ import annotations

from typing import ClassVar, Literal


class LabError(Exception):
    """The root: catch this to catch everything the package raises on purpose."""

    code: ClassVar[str] = "internal-error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class CallerError(LabError):
    code = "invalid-request"


class InvalidRequestError(CallerError):
    code = "invalid-request"


class BodyTooLargeError(InvalidRequestError):
    code = "body-too-large"


class ContextLengthError(InvalidRequestError):
    code = "context-length-exceeded"


class UnclearModelError(InvalidRequestError):
    pass


class UnusableModelError(InvalidRequestError):
    pass


class ModelNotFoundError(CallerError):
    code = "model-not-found"


class UnauthorizedError(CallerError):
    code = "unauthorized"


class HostForbiddenError(CallerError):
    code = "host-forbidden"


class OriginForbiddenError(CallerError):
    code = "origin-forbidden"


class AdminForbiddenError(CallerError):
    code = "admin-forbidden"


class NotFoundError(CallerError):
    code = "not-found"


class SessionNotFoundError(NotFoundError):
    code = "session-not-found"


class TurnNotFoundError(NotFoundError):
    code = "turn-not-found"


class PermissionNotFoundError(NotFoundError):
    code = "permission-not-found"


class McpServerNotFoundError(NotFoundError):
    code = "mcp-server-not-found"


class ConflictError(CallerError):
    code = "conflict"


class TurnInProgressError(ConflictError):
    code = "turn-in-progress"


class IdempotencyConflictError(ConflictError):
    code = "idempotency-conflict"


class AlreadyResolvedError(ConflictError):
    code = "already-resolved"


class RevisionConflictError(ConflictError):
    code = "revision-conflict"


class McpServerExistsError(ConflictError):
    code = "mcp-server-exists"


class GoneError(CallerError):
    code = "gone"


class CursorExpiredError(GoneError):
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
    code = "permission-expired"


class UnavailableError(LabError):
    pass


class NotLoadedError(UnavailableError):
    code = "no-model-loaded"


class OtherModelLoadedError(NotLoadedError):
    pass


class ModelBusyError(UnavailableError):
    code = "model-busy"


class QueueFullError(UnavailableError):
    code = "queue-full"


class StorageFullError(UnavailableError):
    code = "storage-full"


class DownloadError(UnavailableError):
    code = "download-failed"


class UnreachableError(UnavailableError):
    code = "unreachable"


class ConnectionLostError(UnreachableError):
    code = "connection-lost"


class WrongServerError(UnreachableError):
    pass


class UpstreamUnreachableError(UnavailableError):
    code = "upstream-unreachable"


class StoppingError(UnavailableError):
    code = "daemon-stopping"


class EngineError(LabError):
    pass


class GenerationTimeoutError(EngineError):
    code = "lmx-timeout"


class OutOfMemoryError(EngineError):
    code = "oom-unloaded"


class EngineDeadError(EngineError):
    pass


class TurnError(LabError):
    code = "turn-failed"


class DaemonRestartedError(TurnError):
    code = "daemon-restarted"


class TurnTimeoutError(TurnError):
    code = "turn-timeout"


class HostingError(LabError):
    code = "start-failed"


class PortTakenError(HostingError):
    code = "port-taken"


class DaemonRunningError(HostingError):
    code = "daemon-running"
