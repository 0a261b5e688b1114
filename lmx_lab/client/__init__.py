"""Provide typed clients of the inference server and of the daemon, which may run in this process or elsewhere.

``AsyncLabClient`` and ``LabClient`` are for the inference server, ``AsyncDaemonClient`` and ``DaemonClient`` for the
daemon; the second one of each pair blocks. ``ChatFormatClient`` streams chats from any chat-format server.
"""

from lmx_lab.client.blocking.daemon import DaemonClient
from lmx_lab.client.blocking.lab import LabClient
from lmx_lab.client.blocking.session import Session
from lmx_lab.client.blocking.subscription import BlockingSubscription
from lmx_lab.client.chat_chunks import Piece
from lmx_lab.client.chat_format import ChatFormatClient
from lmx_lab.client.cursors import Cursor, CursorStore, FileCursor, MemoryCursor
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.client.event_receiver import ConnectionState
from lmx_lab.client.event_subscription import Subscription
from lmx_lab.client.lab import AsyncLabClient, Include, LabEvent, UnknownLabEvent, as_array
from lmx_lab.client.session import AsyncSession
from lmx_lab.client.sse import Remark
from lmx_lab.client.turn_result import TurnResult
from lmx_lab.wire.events import DaemonEvent, UnknownEvent

__all__ = [
    "AsyncDaemonClient",
    "AsyncLabClient",
    "AsyncSession",
    "BlockingSubscription",
    "ChatFormatClient",
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
