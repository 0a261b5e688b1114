"""Types and a call that the tests of Python functions share."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from lmx_lab.daemon.tools.python_tools import PythonTools
from lmx_lab.daemon.tools.tool import ToolResult


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: float
    y: float = 0.0


@dataclasses.dataclass
class Box:
    low: Point
    high: Point


async def called(tools: PythonTools, function: Callable[..., Any], /, **arguments: Any) -> ToolResult:
    """Register a function and call it."""
    tool = tools.register(function, name="f")
    result = await tools.call(tool.name, arguments)
    assert result is not None
    return result
