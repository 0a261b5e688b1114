"""Read the properties of a model from its files, without loading it: a model folder, or GGUF files by their headers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmx_lab.errors import UnusableModelError, first_names
from lmx_lab.values.models import Facts, Kind, ModelEntry, ModelLocation
from lmx_lab.weights.config_check import check_config, check_positive
from lmx_lab.weights.files import check_files, list_folder, open_regular, read_json, read_regular
from lmx_lab.weights.gguf.header import GgufHeader, read_header
from lmx_lab.weights.gguf.names import is_blob, is_gguf, parts_of
from lmx_lab.weights.hub import require_verified
from lmx_lab.weights.locations import gguf_models, is_model_folder
from lmx_lab.weights.safetensors_header import SafetensorsSummary, read_summary

ADAPTER = "adapter_config.json"
"""The file of a LoRA adapter, both of peft and of mlx-lm."""
INDEX_NAME = "model.safetensors.index.json"
CARD_HEAD = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
TASK = re.compile(r"^pipeline_tag:\s*['\"]?([\w-]+)", re.MULTILINE)
SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")

ENCODERS = frozenset({
    "bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "distilbert", "mpnet", "modernbert", "nomic_bert",
    "electra", "deberta", "deberta-v2", "albert", "eurobert", "new",
})  # fmt: skip
"""How ``modules.json`` names the module of rerankers that compare the logits of two tokens."""
TASKS: dict[str, Kind] = {
    "text-ranking": "rerank",
    "feature-extraction": "embedding",
    "sentence-similarity": "embedding",
}
"""Kinds of models by the ``pipeline_tag`` of the model card, for decoders whose other files leave it open."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
POOLING_LAST, POOLING_RANK = 3, 4
"""llama.cpp's numbers of two pooling types: the last token's vector, and a score. 1 to 3 result in a vector; 0 is
none."""
GGUF_ENCODERS = frozenset({
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
    "t5encoder", "gemma-embedding", "gemma-embedding2", "llama-embed",
})  # fmt: skip
"""llama.cpp's architectures that read text and do not generate any."""
CLASSIFIER = frozenset({"cls.weight", "cls.output.weight"})
NOT_A_MODEL: Mapping[str, str] = {
    "adapter": "an adapter, which modifies another model: load that model instead",
    "controlvector": "a control vector, which modifies another model: load that model instead",
    "imatrix": "an importance matrix (imatrix), which contains no weights: use the file of the model",
    "mmproj": "the projector of a multimodal model (mmproj), not a model: load the model that it belongs to",
    "clip": "the projector of a multimodal model (clip), not a model: load the model that it belongs to",
    "wavtokenizer-dec": "an audio decoder, which does not process text: use another model",
}
"""Descriptions by ``general.type`` or ``general.architecture``."""


def read_entry(location: ModelLocation) -> ModelEntry:
    """Read the entry of a model.

    Raises:
        UnusableModelError: there is no model that can be loaded; the message contains the reason.
    """
    try:
        facts = read_facts(location.path)
        modified_at = int(os.stat(location.path).st_mtime)
    except OSError as exc:
        raise UnusableModelError(
            f"{location.path} cannot be read: {exc.strerror}; check its permissions, or fetch it again"
        ) from exc
    # vars keeps the values of the fields; asdict would also convert the measurements of a copy.
    return ModelEntry(**vars(location), **vars(facts), modified_at=modified_at)


def read_facts(path: Path) -> Facts:
    """Read the properties of the model in a folder or a ``.gguf`` file, after all checks that need no load.

    Raises:
        UnusableModelError: it cannot be loaded; the message contains the reason.
    """
    require_verified(path)
    if path.is_dir():
        models = [] if is_model_folder(path) else gguf_models(path)
        if models:
            shown = first_names([model.name for model in models], 6)
            raise UnusableModelError(f"{path} contains {len(models)} GGUF models; name one of them: {shown}")
        return read_folder(path)
    if is_blob(path.name) and not path.exists():
        raise UnusableModelError(
            f"{path} is missing, although a manifest of Ollama names it; fetch the model again with `ollama pull`"
        )
    if not is_gguf(path.name) and not is_blob(path.name):
        raise UnusableModelError(f"{path} is neither a folder with config.json nor a .gguf file; name one of these")
    return read_gguf_facts(path)


# Model folders


def read_folder(path: Path) -> Facts:
    """Check a model folder as far as headers and file sizes allow, and read the facts about the model.

    Raises:
        UnusableModelError: ``config.json`` is missing or invalid; weights are missing or damaged; there is no
            tokenizer; the model requires custom code or has impossible values; or a file is not regular or too large.
            The message names the file.
    """
    check_files(path)
    config = read_json(path / "config.json")
    architecture = config.get("model_type")
    if config.get("model_file") is not None:
        raise UnusableModelError(
            f"{path} requires custom code ({config['model_file']!r}), which is never run; use another model"
        )
    if "auto_map" in config and "model_type" not in config:
        raise UnusableModelError(
            f"{path} requires custom code (auto_map without model_type), which is never run; use another"
        )
    if not isinstance(architecture, str) or not architecture:
        raise UnusableModelError(f"{path / 'config.json'} has no model_type; fetch the model again, or use another")
    check_config(path / "config.json", config)
    shards = _read_shards(path)
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        raise UnusableModelError(
            f"{path} contains no tokenizer (tokenizer.json, tokenizer.model or a vocabulary); fetch it again"
        )
    # A description such as ``4-bit, group 32``, after the mode or method if it is not MLX's default.
    quantization = max(shards, key=lambda shard: shard.size_bytes).dtype
    table = next((value for value in map(config.get, ("quantization", "quantization_config")) if value), None)
    if isinstance(table, dict):
        mode = table.get("mode", "affine") if "mode" in table or "quant_method" not in table else table["quant_method"]
        bits, group = table.get("bits"), table.get("group_size")
        parts = [] if mode == "affine" else [str(mode)]
        parts += [f"{bits}-bit"] if isinstance(bits, int) else []
        parts += [f"group {group}"] if isinstance(group, int) else []
        quantization = ", ".join(parts) or quantization
    # The smaller of the position limit and the length that files of sentence-transformers define.
    text = config.get("text_config")
    sources = [config, text] if isinstance(text, dict) else [config]
    limits = [s[key] for s in sources for key in CONTEXT_KEYS if _is_count(s.get(key))][:1]
    if (path / "sentence_bert_config.json").exists():
        limit = read_json(path / "sentence_bert_config.json").get("max_seq_length")
        limits += [limit] if _is_count(limit) else []
    return Facts(
        kind=_kind(path, config, architecture),
        format="mlx",
        architecture=architecture,
        size_bytes=sum(shard.size_bytes for shard in shards),
        quantization=quantization,
        context_length=min(limits, default=None),
        warning=_adapter_warning(path),
    )


def _adapter_warning(folder: Path) -> str:
    """Return a warning if a model's folder, or one directly in it, contains a LoRA adapter; empty otherwise."""
    adapters = [path.name for path in (folder, *list_folder(folder)) if os.path.exists(path / ADAPTER)]
    if not adapters:
        return ""
    return (
        f"the LoRA adapter beside the weights (in {first_names(adapters, 3)}) is not applied: to use it, merge it into "
        "the weights, for example with mlx_lm.fuse"
    )


def _read_shards(path: Path) -> list[SafetensorsSummary]:
    names = {file.name for file in path.glob("model*.safetensors")}
    if (path / INDEX_NAME).exists():
        weight_map = read_json(path / INDEX_NAME).get("weight_map")
        named = list(weight_map.values()) if isinstance(weight_map, dict) else [""]
        if any(not isinstance(name, str) or Path(name).name != name or not name for name in named):
            raise UnusableModelError(
                f"{path / INDEX_NAME} is invalid: its weight_map must name files beside it; fetch it again"
            )
        names |= set(named)
    counts = {int(match[1]) for name in names if (match := SHARD.fullmatch(name))}
    names |= {
        f"model-{n:05}-of-{count:05}.safetensors" for count in counts if count < 1000 for n in range(1, count + 1)
    }
    if not names:
        raise UnusableModelError(
            f"{path} contains no model*.safetensors, and PyTorch's own format is not supported; use another model"
        )
    missing = sorted(name for name in names if not (path / name).exists())
    if missing:
        raise UnusableModelError(
            f"{path} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}; fetch it again"
        )
    return [read_summary(path / name) for name in sorted(names)]


def read_card(path: Path) -> str:
    """Return the metadata at the beginning of the model card ``README.md`` as text; empty if there is none."""
    try:
        with open_regular(path / "README.md") as file:
            head = CARD_HEAD.match(file.read(64 * 2**10).decode(errors="replace"))
    except (OSError, UnusableModelError):
        return ""
    return head[1] if head else ""


def _kind(path: Path, config: dict[str, Any], architecture: str) -> Kind:
    names = config.get("architectures")
    heads = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    encoder, modules = path / "config_sentence_transformers.json", path / "modules.json"
    if (
        any(name.endswith("ForSequenceClassification") for name in heads)
        or (encoder.exists() and read_json(encoder).get("model_type") == "CrossEncoder")
        or (modules.exists() and b'.LogitScore"' in read_regular(modules))
    ):
        return "rerank"
    if (path / "modules.json").exists() or (path / "1_Pooling").is_dir():
        return "embedding"
    task = TASK.search(read_card(path))
    if task and task[1] in TASKS:
        return TASKS[task[1]]
    if any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in heads):
        return "chat"
    is_encoder = architecture.replace("_", "-") in {name.replace("_", "-") for name in ENCODERS}
    # A decoder that was saved without its head cannot generate text.
    return "embedding" if is_encoder or any(name.endswith("Model") for name in heads) else "chat"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# GGUF files


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of a whole model: metadata of the first part; size and tensors of all parts.

    The offsets of tensors are relative to their part.

    Args:
        path: The file, or the first part of a split model.

    Raises:
        UnusableModelError: it is not a GGUF file, is damaged, or is split and parts are missing or do not belong to it.
    """
    names = parts_of(path.name)
    if len(names) == 1:
        header = read_header(path)
        if (count := header.integer("split.count") or 0) > 1:
            raise UnusableModelError(
                f"{path} is one of {count} parts, and its name does not say which. "
                f"Restore the names of all parts: NAME-00001-of-{count:05}.gguf and so on"
            )
        return header
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise UnusableModelError(
            f"{path} lacks {len(missing)} of its {len(names)} parts: {first_names(missing, 3)}. "
            "Put them beside it, or fetch the model again"
        )
    parts = [read_header(path.parent / name) for name in names]
    for number, part in enumerate(parts):
        index, total = part.integer("split.no"), part.integer("split.count")
        if (index, total) != (number, len(parts)):
            is_part = index is not None and total is not None
            actual = f"part {(index or 0) + 1} of {total}" if is_part else "not a part of a split model"
            raise UnusableModelError(
                f"{part.path} is part {number + 1} of {len(parts)} by its name, and {actual} by its header. "
                "Fetch all parts again"
            )
    first = parts[0]
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    expected = first.integer("split.tensors.count")
    if len({tensor.name for tensor in tensors}) != len(tensors) or expected not in (None, len(tensors)):
        raise UnusableModelError(
            f"{first.path} and the other parts do not belong to one model: {len(parts)} parts contain {len(tensors)} "
            f"tensors, {expected} different ones were expected. Fetch all parts again"
        )
    return replace(first, size_bytes=sum(part.size_bytes for part in parts), tensors=tensors)


POSITIVE: Mapping[str, float] = {
    "embedding_length": 2**22,
    "block_count": 10_000,
    "context_length": 2**40,
    "rope.freq_base": 10**15,
    "attention.layer_norm_rms_epsilon": 1,
    "attention.layer_norm_epsilon": 1,
}
"""Values of a model that must be above zero, with their largest possible values. Missing values have defaults."""


def read_gguf_facts(path: Path) -> Facts:
    """Read the properties of a model from its GGUF file.

    Raises:
        UnusableModelError: see ``read_gguf``; or the file is not a language model, or has impossible values.
    """
    header = read_gguf(path)
    architecture = header.text("general.architecture")
    for name in filter(None, (header.text("general.type"), architecture)):
        if name in NOT_A_MODEL:
            raise UnusableModelError(f"{path} is {NOT_A_MODEL[name]}")
    if not header.tensors:
        raise UnusableModelError(f"{path} contains no weights, at most a vocabulary: fetch the model itself")
    if architecture is None:
        raise UnusableModelError(f"{path} does not name its architecture: fetch it again, or use another model")
    if header.text("tokenizer.ggml.model") in (None, "no_vocab", "none"):
        raise UnusableModelError(f"{path} contains no vocabulary, so it cannot read text: use another model")
    for key, limit in POSITIVE.items():
        name = f"{header.architecture}.{key}"
        check_positive(path, name, header.metadata.get(name), limit)
    # Other models may have their adapters in a folder with several files.
    is_alone = not is_blob(path.name) and len(gguf_models(path.parent)) == 1
    warnings = [_adapter_warning(path.parent) if is_alone else ""]
    if header.text("tokenizer.ggml.model") == "gpt2" and header.text("tokenizer.ggml.pre") is None:
        warnings.append(
            "the file does not state how texts are divided before they are tokenized (tokenizer.ggml.pre), and "
            "llama.cpp guesses, so answers may be much worse: use a newer file of this model"
        )
    return Facts(
        kind=kind_of(header),
        format="gguf",
        architecture=header.architecture,
        size_bytes=header.size_bytes,
        quantization=header.quantization,
        context_length=header.context_length,
        warning="; ".join(filter(None, warnings)),
    )


def kind_of(header: GgufHeader) -> Kind:
    """Return the kind of a model: by its pooling type, or by its architecture and its last layer if it has none."""
    pooling = header.integer(f"{header.architecture}.pooling_type") or 0
    if pooling == POOLING_RANK:
        return "rerank"
    if pooling > 0:
        return "embedding"
    if header.architecture not in GGUF_ENCODERS:
        return "chat"
    return "rerank" if any(tensor.name in CLASSIFIER for tensor in header.tensors) else "embedding"
