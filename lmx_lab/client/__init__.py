"""Typed clients of the lab's servers; they know nothing of this process's own."""

from lmx_lab.client.chat_format import ChatFormatClient, Piece
from lmx_lab.client.events import Include, LabEvent, UnknownEvent
from lmx_lab.client.inference import AsyncLabClient
from lmx_lab.client.sse import Remark
from lmx_lab.client.vectors import as_array

__all__ = ["AsyncLabClient", "ChatFormatClient", "Include", "LabEvent", "Piece", "Remark", "UnknownEvent", "as_array"]
