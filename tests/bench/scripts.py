"""Scripts for a scripted server: answers to calibration requests and to measured requests."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterator
from typing import Any

from lmx_lab.bench.sample import RequestSample
from tests.daemon.scripted import Script, says

WORDS = says("one ", "two ", "three ", "four", finish="length")


def after_calibration(*scripts: Script) -> Callable[[dict[str, Any]], Script]:
    """Answer calibration requests with ``WORDS``, the others with the scripts in order, then always the last one."""
    left: Iterator[Script] = iter(scripts)

    def script(body: dict[str, Any]) -> Script:
        return WORDS if body["max_tokens"] == 1 else next(left, scripts[-1])

    return script


async def collect(samples: AsyncIterable[RequestSample]) -> list[RequestSample]:
    return [sample async for sample in samples]
