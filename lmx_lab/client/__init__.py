"""Provide typed clients of the inference server and of the daemon, which may run in this process or elsewhere.

``AsyncLabClient`` and ``LabClient`` are for the inference server, ``AsyncDaemonClient`` and ``DaemonClient`` for the
daemon; the second one of each pair blocks. ``ChatFormatClient`` streams chats from any chat-format server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmx_lab.client.chat_format import ChatFormatClient, Piece
    from lmx_lab.client.connection import Remark
    from lmx_lab.client.daemon import AsyncDaemonClient, AsyncSession, BlockingSubscription, DaemonClient, Session
    from lmx_lab.client.daemon_routes import ClientTimes
    from lmx_lab.client.lab import AsyncLabClient, Include, LabClient, LabEvent, UnknownLabEvent, as_array
    from lmx_lab.client.subscription import (
        ConnectionState,
        Cursor,
        CursorStore,
        FileCursor,
        MemoryCursor,
        Subscription,
    )
    from lmx_lab.client.turn import TurnResult
    from lmx_lab.wire.events import DaemonEvent, UnknownEvent

_MODULES = {
    "client.chat_format": ("ChatFormatClient", "Piece"),
    "client.connection": ("Remark",),
    "client.daemon": ("AsyncDaemonClient", "AsyncSession", "BlockingSubscription", "DaemonClient", "Session"),
    "client.daemon_routes": ("ClientTimes",),
    "client.lab": ("AsyncLabClient", "Include", "LabClient", "LabEvent", "UnknownLabEvent", "as_array"),
    "client.subscription": (
        *("ConnectionState", "Cursor", "CursorStore", "FileCursor", "MemoryCursor", "Subscription"),
    ),
    "client.turn": ("TurnResult",),
    "wire.events": ("DaemonEvent", "UnknownEvent"),
}
_EXPORTS = {name: f"lmx_lab.{module}" for module, names in _MODULES.items() for name in names}
__all__ = [
    "AsyncDaemonClient",
    "AsyncLabClient",
    "AsyncSession",
    "BlockingSubscription",
    "ChatFormatClient",
    "ClientTimes",
    "ConnectionState",
    "Cursor",
    "CursorStore",
    "DaemonClient",
    "DaemonEvent",
    "FileCursor",
    "Include",
    "LabClient",
    "LabEvent",
    "MemoryCursor",
    "Piece",
    "Remark",
    "Session",
    "Subscription",
    "TurnResult",
    "UnknownEvent",
    "UnknownLabEvent",
    "as_array",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Lazily: the daemon needs only two of these modules, and would take 0.2 s longer to start with all of them.
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
