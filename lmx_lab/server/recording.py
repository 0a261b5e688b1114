"""Decide which generations are recorded, draw their seeds, and describe them as records.

A record is a description of tokens: the rendered prompt, the answer, and everything that generating it again needs.
"""

from __future__ import annotations

import hmac
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import HTTPConnection

from lmx_lab.engine import Answer, GenerationRequest
from lmx_lab.engine.requests import AnswerStart
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.outputs import merge_deltas, merge_tool_calls
from lmx_lab.values.recording import Continuation, Provenance, Record, RecordMode

OWN_HEADER = "x-lmx-own"
"""Header with which clients that ``lab.openai`` has configured, and the daemon of a lab, mark their requests."""
NOT_STORED = frozenset({"caller", "timeout_s", "model", "share_prefix"})
"""Fields of a request that are not stored in its settings; the address of the client is stored nowhere."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The values that the record of an answer needs in addition to the answer."""

    own: bool
    choice: int
    at: float = field(default_factory=time.time)


SaveRecord = Callable[[Callable[[], Record], ModelEntry], None]
"""Stores a record. It is created by the function, which may be called on another thread, later. The entry is that of
the model, whose files may be hashed."""


class Recording:
    """Which requests of a server are recorded.

    Args:
        save: Called at the end of each recorded generation.
        dtype: The setting of this name.
    """

    def __init__(self, mode: RecordMode, save: SaveRecord, *, dtype: str) -> None:
        self.mode = mode
        self.own_headers = {OWN_HEADER: secrets.token_urlsafe(16)}
        """Headers that mark the requests of this lab's own clients. Other clients do not know the value."""
        self._save = save
        self._dtype = dtype

    def is_own(self, connection: HTTPConnection) -> bool:
        """Whether a request was sent by a client of this lab's notebook."""
        given = connection.headers.get(OWN_HEADER)
        return given is not None and hmac.compare_digest(given.encode(), self.own_headers[OWN_HEADER].encode())

    def answer_headers(self, *, own: bool) -> dict[str, str]:
        """Return the headers that tell another client that its request is recorded."""
        return {"x-lmx-recorded": "1"} if self.mode == "all" and not own else {}

    def end(self, recorded: Recorded, answer: Answer, outcome: str, code: str | None) -> None:
        """Store the record of an answer that has ended."""
        self._save(lambda: self.record(recorded, answer, outcome, code), answer.origin.entry)

    def record(self, recorded: Recorded, answer: Answer, outcome: str, code: str | None = None) -> Record:
        """Return the record of an answer that has ended, and whose deltas were kept, without storing it."""
        whole = merge_deltas(answer.deltas or ())
        calls = merge_tool_calls(whole.tool_calls)
        timings = {} if answer.report is None else asdict(answer.report)
        entry, spec = answer.origin.entry, answer.origin.spec
        return Record(
            at=recorded.at,
            request_id=answer.request.caller.request_id or "",
            own=recorded.own,
            batch=answer.request.caller.batch,
            choice=recorded.choice,
            request=request_to_json(answer.request),
            prompt=answer.prompt,
            answer=whole.ids if len(whole.ids) == whole.tokens else None,
            text=whole.text,
            reasoning=whole.reasoning,
            tool_calls=tuple({"name": call.name or "", "arguments": call.arguments} for call in calls),
            logprobs=whole.logprobs,
            outcome=outcome,
            code=code,
            timings={name: value for name, value in timings.items() if name not in ("model", "finish_reason")},
            steps=answer.steps.steps(),
            provenance=Provenance(
                model=entry.id,
                format=entry.format,
                quantization=entry.quantization,
                dtype=self._dtype,
                options=dict(spec.options),
                engine=answer.origin.fingerprint,
                versions={"lmx-lab": version("lmx-lab"), "python": platform.python_version()},
                machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            ),
        )


def with_seed(request: GenerationRequest) -> GenerationRequest:
    """Return the request with a random seed if it is sampled and has none, so that it can be repeated."""
    sampling = request.sampling
    if sampling.seed is not None or sampling.temperature == 0:
        return request
    return replace(request, sampling=replace(sampling, seed=secrets.randbits(31)))


# Built on import, because it reads docstrings: Python 3.11.7 cannot parse source code on two threads at the same time.
_REQUESTS: TypeAdapter[GenerationRequest] = TypeAdapter(GenerationRequest)


def request_to_json(request: GenerationRequest) -> dict[str, Any]:
    """Return a request as JSON values, without its model and its caller."""
    values: dict[str, Any] = _REQUESTS.dump_python(request, mode="json", exclude=set(NOT_STORED))
    return values


def request_from_json(stored: Mapping[str, Any], *, model: str) -> GenerationRequest:
    """Return the request that ``request_to_json`` has converted. Fields of newer versions are ignored."""
    given = {name: value for name, value in stored.items() if name not in NOT_STORED}
    return _REQUESTS.validate_python({**given, "model": model})


def continued_request(continuation: Continuation) -> GenerationRequest:
    """Return the request that generates an answer again from a given position, with a new seed."""
    request = request_from_json(continuation.request, model=continuation.model)
    request = replace(
        request,
        start=AnswerStart(prompt=continuation.prompt, answer=continuation.answer, token=continuation.token),
        sampling=replace(request.sampling, seed=continuation.seed),
        # A recorded request may have scored its prompt.
        score_prompt=False,
    )
    if continuation.max_tokens is not None:
        request = replace(request, max_tokens=continuation.max_tokens)
    if continuation.top_logprobs is not None:
        request = replace(request, top_logprobs=continuation.top_logprobs)
    return with_seed(request)
