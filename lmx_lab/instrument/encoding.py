"""Convert records to JSON and back. Fields that this version does not know are ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from lmx_lab.values.generation import TokenLogprob
from lmx_lab.values.recording import Provenance, Record
from lmx_lab.values.timeline import decode_steps, encode_steps

T = TypeVar("T")
ELSEWHERE = frozenset({"id", "provenance"})
"""Fields of a record that are stored in separate columns."""


def encode_record(record: Record) -> bytes:
    """Return the fields of a record as JSON, without its id and its provenance."""
    values = {each.name: getattr(record, each.name) for each in fields(record) if each.name not in ELSEWHERE}
    values["logprobs"] = [_encode_token(token) for token in record.logprobs]
    values["steps"] = encode_steps(record.steps)
    return json.dumps(values, separators=(",", ":")).encode()


def decode_record(data: bytes, *, id_: int, provenance: Provenance) -> Record:
    """Return the record in the JSON of ``encode_record``."""
    values = json.loads(data)
    for name in ("prompt", "answer", "tool_calls"):
        values[name] = None if values[name] is None else tuple(values[name])
    values["logprobs"] = tuple(map(_decode_token, values["logprobs"]))
    values["steps"] = decode_steps(values.get("steps") or [])
    return _build(Record, {**values, "id": id_, "provenance": provenance})


def encode_provenance(provenance: Provenance) -> str:
    """Return a provenance as JSON. Equal values have the same JSON."""
    values = {each.name: getattr(provenance, each.name) for each in fields(provenance)}
    return json.dumps(values, sort_keys=True)


def decode_provenance(data: str) -> Provenance:
    """Return the provenance in the JSON of ``encode_provenance``."""
    return _build(Provenance, json.loads(data))


def with_hashes(data: str, *, weights: str, template: str) -> str:
    """Return the JSON of a provenance with the hashes of the model's files."""
    return encode_provenance(replace(decode_provenance(data), weights=weights, template=template))


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in known})


def _encode_token(token: TokenLogprob) -> list[Any]:
    # In Latin-1, each byte is one character, so parts of characters can also be stored.
    data = token.bytes.decode("latin-1")
    others = [_encode_token(other) for other in token.top]
    named = [_encode_token(other) for other in token.named]
    return [token.token, token.text, data, token.logprob, token.ends, token.rank, token.entropy, others, named]


def _decode_token(values: Sequence[Any]) -> TokenLogprob:
    token, text, data, logprob, ends, rank, entropy, others, named = values[:9]
    return TokenLogprob(
        token=token,
        text=text,
        bytes=data.encode("latin-1"),
        logprob=logprob,
        ends=ends,
        rank=rank,
        entropy=entropy,
        top=tuple(map(_decode_token, others)),
        named=tuple(map(_decode_token, named)),
    )
