"""What a lab did in the last quarter of an hour: its figures twice a second, and how its requests ended."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from lmx_lab.wire.admin import RequestEvent, Sample

KEPT_S = 15 * 60
MOST_SAMPLES = 2 * KEPT_S
MOST_REQUESTS = 1000


@dataclass(frozen=True, kw_only=True)
class EndedRequest:
    at: float
    """Seconds since 1970."""
    event: RequestEvent


class History:
    """Filled by the workbench, read by any thread."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._requests: deque[EndedRequest] = deque(maxlen=MOST_REQUESTS)

    @property
    def samples(self) -> list[Sample]:
        """The oldest first."""
        return list(self._samples)

    @property
    def requests(self) -> list[EndedRequest]:
        """The oldest first, up to a thousand."""
        return list(self._requests)

    def add_sample(self, sample: Sample) -> None:
        if self._samples and self._samples[-1].at == sample.at:
            return  # a server elsewhere tells one a second, and is looked at twice
        self._samples.append(sample)
        while self._samples[0].at < sample.at - KEPT_S:
            self._samples.popleft()

    def add_request(self, event: RequestEvent) -> None:
        self._requests.append(EndedRequest(at=time.time(), event=event))
