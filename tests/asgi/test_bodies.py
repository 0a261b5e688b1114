"""Large bodies are read where they hold nobody up."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lmx_lab.asgi import bodies
from lmx_lab.errors import InvalidRequestError

pytestmark = pytest.mark.anyio


async def test_only_a_large_body_is_read_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    parse = bodies.parse_json

    def noted(text: bytes | str) -> Any:
        threads.append(threading.current_thread())
        return parse(text)

    monkeypatch.setattr(bodies, "parse_json", noted)
    large = b"[" + b"1," * (bodies.LARGE_BODY_BYTES // 2) + b"1]"
    assert await bodies.parse_json_aside(b"[1]") == [1]
    assert len(await bodies.parse_json_aside(large)) == bodies.LARGE_BODY_BYTES // 2 + 1
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False]


async def test_what_is_wrong_with_a_large_body_is_said_too() -> None:
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        await bodies.parse_json_aside(b"[" + b"1," * bodies.LARGE_BODY_BYTES)


@pytest.mark.parametrize("text", [b"1e400", b"[1, -1e999]", b'{"a": [{"b": 1e309}]}'])
def test_a_number_that_would_be_read_as_infinity_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="beyond"):
        bodies.parse_json(text)
