"""Record what a lab did in the last 15 minutes: measurements twice a second, and the ends of requests."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from lmx_lab.wire.admin import RequestEvent, Sample

KEPT_S = 15 * 60
MAX_SAMPLES = 2 * KEPT_S
MAX_REQUESTS = 1000


@dataclass(frozen=True, kw_only=True)
class EndedRequest:
    """A request that has ended, and the time of its end."""

    at: float
    """Seconds since 1970."""
    event: RequestEvent


class History:
    """The samples and the ended requests. The workbench adds to it; it can be read from any thread."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._requests: deque[EndedRequest] = deque(maxlen=MAX_REQUESTS)

    @property
    def samples(self) -> list[Sample]:
        """The samples, oldest first."""
        return list(self._samples)

    @property
    def requests(self) -> list[EndedRequest]:
        """At most ``MAX_REQUESTS`` requests, oldest first."""
        return list(self._requests)

    def add_sample(self, sample: Sample) -> None:
        if self._samples and self._samples[-1].at == sample.at:
            return  # A server elsewhere sends one sample per second, but samples are read twice per second.
        self._samples.append(sample)
        while self._samples[0].at < sample.at - KEPT_S:
            self._samples.popleft()

    def add_request(self, event: RequestEvent) -> None:
        self._requests.append(EndedRequest(at=time.time(), event=event))
