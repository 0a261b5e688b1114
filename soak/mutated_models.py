"""Write tiny models with one randomly changed file, in every format that the server loads."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors.numpy import load_file, save_file

from soak.fuzzing.values import Raw, changed_body, to_json
from soak.models import is_installed, write_models
from soak.report import Soak
from tests.support.gguf import TEMPLATE_KEY, GgufFile, read_gguf
from tests.support.models import THINKER_TEMPLATE

Change = Callable[[random.Random, Path, Path], None]
"""Reads a valid file and writes a changed one."""
LLAMA, QUANTIZED, EMBEDDER, RERANKER = "tiny", "tiny-4-bit", "tiny-embedder", "tiny-reranker"
GGUF_LLAMA, GGUF_RERANKER = "tiny.gguf", "tiny-reranker.gguf"
CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
WEIGHTS, TEMPLATE = "model.safetensors", "chat_template.jinja"
PIECES = (b"\0", b"\xff", b"\x80", b"{", b"}", b'"', b"0", b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7)
NUMBERS = (0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
"""Counts, lengths and offsets that are almost always wrong."""
CONFIG_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 3, 2**31, 2**63, 10**9, 0.5, -1e308, 1e-320, "", "llama", None, [], {}, True),
    *map(Raw, ("NaN", "Infinity", "-Infinity", "1e400", "9" * 400)),
)
QUANTIZATIONS = tuple(
    {"group_size": size, "bits": bits} for size in (0, 1, 32, -32, 2**40) for bits in (0, 1, 4, 7, -4, 64, "four")
)
FRAGMENTS = (
    *("{% for a in range(10**9) %}x{% endfor %}", "{{ 9**9**9 }}", "{{ 'a' * 10**10 }}", "{% endif %}", "{{", "{%"),
    *("{{ messages.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{% if true %}", "{{ 1/0 }}", "{{ no.a }}"),
    *("{% include 'config.json' %}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "\0", "\ud7ff", "{#"),
    *("{% set a = messages[5] %}{{ a.content }}", "{{ messages | map('upper') | join }}", "{{ '%s' % messages }}"),
)
TOKENS = 1024
"""Size of the shortened vocabulary of the chat model for MLX."""
MAX_SCALAR = 1000
"""Metadata values of GGUF files with more bytes than this are lists or the chat template."""


@dataclass(frozen=True, kw_only=True)
class MutatedPart:
    """A part of a model that is changed."""

    name: str
    original: str
    """Name of the valid model."""
    file: str = ""
    """Name of the changed file in the model's folder; empty for a GGUF file."""
    change: Change


class MutatedModels:
    """Valid tiny models below a folder, and copies with a change that is determined by a seed and a number."""

    def __init__(self, folder: Path, soak: Soak) -> None:
        self._folder, self._seed = folder, soak.seed
        models = folder / "models"
        write_models(models, soak, "MLX")
        _shorten_vocabulary(models / LLAMA)
        (models / LLAMA / TEMPLATE).write_text(THINKER_TEMPLATE)
        _write_quantized(models / LLAMA, models / QUANTIZED)
        self._originals = {name: models / name for name in (LLAMA, QUANTIZED, EMBEDDER, RERANKER)}
        if is_installed("llama.cpp"):
            write_models(folder / "gguf", soak, "llama.cpp")
            for name in (GGUF_LLAMA, GGUF_RERANKER):
                (self._originals[name],) = (folder / "gguf" / Path(name).stem).glob("*.gguf")
        self._parts = [part for part in PARTS if part.original in self._originals]

    @property
    def valid(self) -> Path:
        """The chat model that is loaded beside the mutated ones."""
        return self._originals[LLAMA]

    def write(self, number: int) -> tuple[MutatedPart, Path]:
        """Write the mutated model of this number; return what was changed, and the model's folder or GGUF file."""
        chance = random.Random(f"{self._seed}/{number}")
        part = self._parts[number % len(self._parts)]
        original = self._originals[part.original]
        target = self._folder / f"mutated-{number}"
        target.mkdir()
        if not part.file:
            file = target / "model.gguf"
            part.change(chance, original, file)
            return part, file
        for path in original.rglob("*"):
            copy = target / path.relative_to(original)
            if path.is_file() and path != original / part.file:
                copy.parent.mkdir(exist_ok=True)
                os.link(path, copy)
        (target / part.file).parent.mkdir(exist_ok=True)
        part.change(chance, original / part.file, target / part.file)
        return part, target


def _shorten_vocabulary(folder: Path) -> None:
    """Keep only the first tokens of a vocabulary and their merges, so that a load takes a tenth of the time."""
    tokenizer, config = (json.loads((folder / name).read_bytes()) for name in (TOKENIZER, CONFIG))
    kept = {token: number for token, number in tokenizer["model"]["vocab"].items() if number < TOKENS}
    merges = tokenizer["model"]["merges"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    known = [merge for merge, pair in zip(merges, pairs, strict=True) if {*pair, "".join(pair)} <= kept.keys()]
    tokenizer["model"] |= {"vocab": kept, "merges": known}
    (folder / TOKENIZER).write_text(json.dumps(tokenizer))
    (folder / CONFIG).write_text(json.dumps(config | {"vocab_size": TOKENS}))
    weights = load_file(folder / WEIGHTS)
    embeddings = {name: weight[:TOKENS] for name, weight in weights.items() if "embed_tokens" in name}
    save_file(weights | embeddings, folder / WEIGHTS, metadata={"format": "mlx"})


def _write_quantized(source: Path, target: Path) -> None:
    """Write a copy of a model with 4-bit weights."""
    target.mkdir()
    for path in source.iterdir():
        if path.name not in (WEIGHTS, CONFIG):
            os.link(path, target / path.name)
    weights = mx.load(str(source / WEIGHTS))
    assert isinstance(weights, dict)
    quantization = {"group_size": 32, "bits": 4}
    written = {}
    for name, weight in weights.items():
        if weight.ndim == 1:
            written[name] = weight
            continue
        parts = mx.quantize(weight, group_size=32, bits=4)
        written |= dict(
            zip((name, *(name.replace("weight", each) for each in ("scales", "biases"))), parts, strict=True)
        )
    mx.save_safetensors(str(target / WEIGHTS), written, metadata={"format": "mlx"})
    config = json.loads((source / CONFIG).read_text()) | {"quantization": quantization}
    (target / CONFIG).write_text(json.dumps(config))


# Changes


def _change_bytes(chance: random.Random, data: bytes, end: int | None = None) -> bytes:
    """Change the first ``end`` bytes in one to three places, or truncate them."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(min(len(data), end or len(data)) or 1)
        size = chance.choice((1, 1, 2, 8, 100))
        match chance.randrange(7):
            case 0:
                data = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] if data else b"\0"
            case 1 | 2:
                piece = chance.choice(PIECES)
                data = data[:at] + piece + data[at + len(piece) :]
            case 3:
                data = data[:at] + chance.choice(PIECES) + data[at:]
            case 4:
                data = data[:at] + data[at + size :]
            case 5:
                data = data[:at] + data[at : at + size] + data[at:]
            case _:
                data = data[:at] + chance.randbytes(size) + data[at + size :]
    return data[: chance.randrange(len(data) + 1)] if not chance.randrange(12) else data


def _bytes(chance: random.Random, source: Path, target: Path) -> None:
    target.write_bytes(_change_bytes(chance, source.read_bytes()))


def _json(chance: random.Random, source: Path, target: Path) -> None:
    """Change a JSON file: single bytes, or its values."""
    if not chance.randrange(5):
        _bytes(chance, source, target)
        return
    good = json.loads(source.read_bytes())
    body = changed_body(chance, good, [good])
    target.write_bytes(to_json(body).encode("utf-8", "surrogatepass"))


def _config(chance: random.Random, source: Path, target: Path) -> None:
    """Change a ``config.json``, mostly by replacing one of its values with a value for another field."""
    if not chance.randrange(3):
        _json(chance, source, target)
        return
    config = json.loads(source.read_bytes())
    for key in chance.sample(sorted(config), chance.choice((1, 1, 1, 2))):
        config[key] = chance.choice(CONFIG_VALUES)
    if not chance.randrange(4) or "quantization" in config:
        config["quantization"] = chance.choice(QUANTIZATIONS)
    target.write_text(to_json(config))


def _template(chance: random.Random, source: Path, target: Path) -> None:
    target.write_bytes(_changed_template(chance, source.read_bytes()))


def _changed_template(chance: random.Random, template: bytes) -> bytes:
    at = chance.randrange(len(template))
    match chance.randrange(3):
        case 0:
            return _change_bytes(chance, template)
        case 1:
            return chance.choice(FRAGMENTS).encode()
    return template[:at] + chance.choice(FRAGMENTS).encode() + template[at:]


def _safetensors_header(chance: random.Random, source: Path, target: Path) -> None:
    """Change the length of the header, its bytes, or its values; the length then fits."""
    data = source.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, tensors = data[8 : 8 + length], data[8 + length :]
    how = chance.randrange(6)
    if how == 0:
        data = chance.choice((*NUMBERS, length - 1, length + 1)).to_bytes(8, "little") + data[8:]
    elif how == 1:
        data = _change_bytes(chance, data, 8 + length)
    else:
        good = json.loads(header)
        if how == 2:
            good = changed_body(chance, good, [good])
        else:
            _change_tensor(chance, good)
        header = to_json(good).encode("utf-8", "surrogatepass")
        data = len(header).to_bytes(8, "little") + header + tensors
    target.write_bytes(data)


def _change_tensor(chance: random.Random, header: dict[str, Any]) -> None:
    """Change the type, shape, offsets or name of one tensor in a safetensors header."""
    name = chance.choice(sorted(set(header) - {"__metadata__"}))
    tensor = header[name]
    match chance.randrange(6):
        case 0:
            tensor["dtype"] = chance.choice(("F16", "BF16", "F64", "I64", "U8", "BOOL", "C64", "F8_E4M3", "F4", "", 5))
        case 1:
            tensor["shape"][chance.randrange(len(tensor["shape"]))] = chance.choice((*NUMBERS, -1, 2**70, 1.5))
        case 2:
            tensor["shape"] = chance.choice((tensor["shape"][::-1], [], [1, *tensor["shape"]], None, "32"))
        case 3:
            tensor["data_offsets"][chance.randrange(2)] = chance.choice((*NUMBERS, -1, 2**70, 0.5))
        case 4:
            header[chance.choice(("", "\0", "a" * 1000, "model.norm.weight", f"{name}.more"))] = header.pop(name)
        case _:
            tensor["dtype"], tensor["shape"] = "U8", [tensor["data_offsets"][1] - tensor["data_offsets"][0]]


def _tensor_data(chance: random.Random, source: Path, target: Path) -> None:
    """Fill a part of a file's second half, which contains only tensors, with infinity, NaN or random bytes."""
    data = source.read_bytes()
    start = chance.randrange(len(data) // 2, len(data))
    end = min(len(data), start + chance.choice((4, 4096, len(data))))
    fill = chance.choice((struct.pack("<f", float("inf")), struct.pack("<f", float("nan")), chance.randbytes(4), b"\0"))
    data = data[:start] + (fill * (end - start))[: end - start] + data[end:]
    # A few files are truncated or too long.
    target.write_bytes(chance.choice((data,) * 6 + (data[:start], data + fill)))


def _gguf_head(chance: random.Random, source: Path, target: Path) -> None:
    """Change the magic number, the version or the counts, or bytes of the first 4 kB."""
    data = bytearray(source.read_bytes())
    at, layout = chance.choice(((0, "<I"), (4, "<I"), (8, "<Q"), (16, "<Q"), (0, "")))
    if layout:
        number = struct.unpack_from(layout, data, at)[0]
        struct.pack_into(
            layout, data, at, chance.choice((*NUMBERS, number + 1, number - 1)) % 256 ** struct.calcsize(layout)
        )
        target.write_bytes(data)
    else:
        target.write_bytes(_change_bytes(chance, bytes(data), 4096))


def _gguf_metadata(chance: random.Random, source: Path, target: Path) -> None:
    """Change, remove, exchange or rename values of the metadata."""
    file = read_gguf(source)
    values = dict(file.values)
    for _ in range(chance.choice((1, 1, 2, 4))):
        key = chance.choice(sorted(values))
        value = values[key]
        match chance.randrange(7):
            case 0:
                del values[key]
            case 1:
                values[key] = values[chance.choice(sorted(values))]
            case 2:
                values[chance.choice(("", "\0", "a" * 70_000, "general.alignment", f"{key}.more"))] = values.pop(key)
            case 3:
                values[key] = _change_bytes(chance, value, MAX_SCALAR)
            case 4:
                values[key] = struct.pack("<I", chance.randrange(14)) + value[4:]
            case 5 if len(value) > MAX_SCALAR:
                values[key] = value[:8] + struct.pack("<Q", chance.choice(NUMBERS)) + value[16:]
            case _:
                values[key] = value[:4] + struct.pack("<Q", chance.choice(NUMBERS))[: max(1, len(value) - 4)]
    replace(file, values=values).written(target)


def _gguf_template(chance: random.Random, source: Path, target: Path) -> None:
    template = _changed_template(chance, THINKER_TEMPLATE.encode()).decode("utf-8", "replace")
    read_gguf(source).changed({TEMPLATE_KEY: template}).written(target)


def _gguf_tensors(chance: random.Random, source: Path, target: Path) -> None:
    """Change the table of tensors: names, numbers of dimensions, shapes, types; remove, exchange or repeat tensors."""
    file = read_gguf(source)
    tensors = dict(file.tensors)
    for _ in range(chance.choice((1, 1, 2))):
        name, other = (chance.choice(sorted(tensors)) for _ in range(2))
        info = bytearray(tensors[name].info)
        shape = 8 + len(name.encode()) + 4
        match chance.randrange(6):
            case 0:
                del tensors[name]
            case 1:
                tensors[name] = replace(tensors[name], data=tensors[other].data)
            case 2:
                struct.pack_into(
                    "<I", info, len(info) - 4, chance.choice((0, 1, 2, 3, 8, 12, 24, 30, 39, 99, 2**32 - 1))
                )
            case 3:
                struct.pack_into("<Q", info, shape, chance.choice(NUMBERS))
            case 4:
                struct.pack_into("<I", info, shape - 4, chance.choice((0, 1, 3, 4, 5, 2**32 - 1)))
            case _:
                info = bytearray(_change_bytes(chance, bytes(info)))
        if name in tensors:
            tensors[name] = replace(tensors[name], info=bytes(info))
    GgufFile(values=file.values, tensors=tensors).written(target)


def _of(original: str, changes: Mapping[str, tuple[Change, ...]]) -> list[MutatedPart]:
    return [
        MutatedPart(name=f"{file} of {original}", original=original, file=file, change=change)
        for file, each in changes.items()
        for change in each
    ]


def _of_gguf(original: str, changes: Mapping[str, Change]) -> list[MutatedPart]:
    return [
        MutatedPart(name=f"{what} of {original}", original=original, change=change) for what, change in changes.items()
    ]


PARTS: Sequence[MutatedPart] = (
    *_of(
        LLAMA,
        {
            CONFIG: (_config, _config),
            TOKENIZER: (_json, _bytes),
            TOKENIZER_CONFIG: (_json, _json),
            TEMPLATE: (_template, _template),
            WEIGHTS: (_safetensors_header, _safetensors_header, _tensor_data),
        },
    ),
    *_of(QUANTIZED, {CONFIG: (_config,), WEIGHTS: (_safetensors_header, _tensor_data)}),
    *_of(
        EMBEDDER,
        {
            CONFIG: (_config,),
            TOKENIZER: (_json,),
            "modules.json": (_json,),
            "1_Pooling/config.json": (_json,),
            WEIGHTS: (_safetensors_header,),
        },
    ),
    *_of(RERANKER, {CONFIG: (_config,), TOKENIZER: (_bytes,), TOKENIZER_CONFIG: (_json,), WEIGHTS: (_tensor_data,)}),
    *_of_gguf(
        GGUF_LLAMA,
        {
            "head": _gguf_head,
            "metadata": _gguf_metadata,
            "values": _gguf_metadata,
            "chat template": _gguf_template,
            "table of tensors": _gguf_tensors,
            "tensors": _tensor_data,
        },
    ),
    *_of_gguf(
        GGUF_RERANKER,
        {"head": _gguf_head, "metadata": _gguf_metadata, "table of tensors": _gguf_tensors, "tensors": _tensor_data},
    ),
)
"""The parts to mutate. A part that is listed twice is mutated twice as often, because more of it can be wrong."""
