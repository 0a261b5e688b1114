"""Ids of the daemon's API: prefixed and sortable by their time of making; of sessions and turns a client may choose."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
Identifier = Annotated[str, StringConstraints(pattern=PATTERN)]
