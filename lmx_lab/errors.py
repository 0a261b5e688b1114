"""Every deliberate error of the package.

::

    LabError
      CallerError                  the request is wrong; sending it again will not help
        InvalidRequestError        a malformed body, a missing, mistyped or impossible value
          BodyTooLargeError        more bytes than the limit
          ContextLengthError       prompt longer than the model's context
          UnusableModelError       files that are no model, are damaged, or that no engine here runs
        ModelNotFoundError         the name is not on disk (and may not, or could not, be downloaded)
        UnauthorizedError          a key is needed and was not given, or is wrong
        HostForbiddenError         Host header outside the allow-list
        OriginForbiddenError       Origin header of a page that is not allowed
        AdminForbiddenError        another host may not load, unload or download
      UnavailableError             right request, wrong moment; the message says when or what first
        NotLoadedError             no model is in memory, or it is about to go
          OtherModelLoadedError    another model than the one asked for
        ModelBusyError             another load is under way
        QueueFullError             too many requests wait
        StorageFullError           the disk cannot take the download
        DownloadError              the hub or the package index failed
        UnreachableError           no server of the lab answers at an address, or not in its words
          ConnectionLostError      it went away in the middle of an answer
      EngineError                  this generation failed, the engine is usable
        GenerationTimeoutError     the request's deadline passed
        OutOfMemoryError           the model was unloaded, or refused, for lack of memory
        EngineDeadError            the engine thread is gone; only a load helps
      HostingError                 a server could not be started where it was asked to run
        PortTakenError             the explicit port is in use

``code`` is what programs read: it never changes once released. The message is for people: it names the value, the limit
and the next step. HTTP statuses live in ``lmx_lab.server.errors``.
"""

from __future__ import annotations

from typing import ClassVar


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
    pass


class ContextLengthError(InvalidRequestError):
    code = "context-length-exceeded"


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


class EngineError(LabError):
    pass


class GenerationTimeoutError(EngineError):
    code = "lmx-timeout"


class OutOfMemoryError(EngineError):
    code = "oom-unloaded"


class EngineDeadError(EngineError):
    pass


class HostingError(LabError):
    code = "start-failed"


class PortTakenError(HostingError):
    code = "port-taken"
