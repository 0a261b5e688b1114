"""Where models may lie, and what is read of each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import Facts, Kind, ModelEntry, Source
from lmx_lab.weights.files import check_files, open_regular, read_json, read_regular
from lmx_lab.weights.gguf.model import read_gguf_facts
from lmx_lab.weights.gguf.names import GgufFiles, choices, grouped, is_gguf, labelled, parts_of
from lmx_lab.weights.hub.cache import CachedRepo, repositories
from lmx_lab.weights.hub.verify import is_unverified, refuse_unverified
from lmx_lab.weights.safetensors_header import SafetensorsSummary, read_summary
from lmx_lab.weights.starters import STARTERS

NAMED_IN_ERRORS = 6
INDEX_NAME = "model.safetensors.index.json"
MAX_CARD_BYTES = 64 * 2**10
CARD_HEAD = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
TASK = re.compile(r"^pipeline_tag:\s*['\"]?([\w-]+)", re.MULTILINE)
SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")

ENCODERS = frozenset({
    "bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "distilbert", "mpnet", "modernbert", "nomic_bert",
    "electra", "deberta", "deberta-v2", "albert", "eurobert", "new",
})  # fmt: skip
LOGIT_SCORE = b'.LogitScore"'
"""How ``modules.json`` names the module of a reranker that answers yes or no."""
TASKS: dict[str, Kind] = {
    "text-ranking": "rerank",
    "feature-extraction": "embedding",
    "sentence-similarity": "embedding",
}
"""What a model card's ``pipeline_tag`` says of a decoder that its other files leave open."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
LAYER_KEYS = (
    "num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_nextn_predict_layers", "num_encoder_layers",
    "num_decoder_layers", "encoder_layers", "decoder_layers", "depth", "num_transformer_layers", "num_loops",
    "num_kv_reuse_layers", "altup_num_inputs", "emb_neighbor_num", "o_groups",
)  # fmt: skip
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
MOST = dict.fromkeys(LAYER_KEYS, 1000) | dict.fromkeys(EXPERT_KEYS, 10_000)
"""Of what mlx-lm counts through before it looks at a weight: a billion would never end. The largest models have a tenth
of it."""
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True, kw_only=True)
class ModelLocation:
    """Where a model may be; nothing of it was read yet."""

    id: str
    path: Path
    source: Source
    also: tuple[str, ...] = ()
    """Other names that mean it, where no model has them for an id; upper and lower case are one."""

    def is_called(self, name: str) -> bool:
        """Whether the name is one of the others."""
        return name.casefold() in (other.casefold() for other in self.also)


def folder_locations(folder: Path, source: Source) -> Iterator[ModelLocation]:
    """Models in a folder by the names of their files or folders, one level below as ``org/name``; or the folder."""
    if _is_model_folder(folder):
        yield ModelLocation(id=folder.name, path=folder, source=source)
        return
    for path in _gguf_models(folder):
        yield ModelLocation(id=path.name, path=path, source=source)
    for path in _folders(folder):
        yield from _below(path, path.name, source)
        if not _is_model_folder(path):
            for below in _folders(path):
                yield from _below(below, f"{path.name}/{below.name}", source)


def _below(folder: Path, name: str, source: Source) -> Iterator[ModelLocation]:
    """The one model of a folder by the folder's name; of several GGUF models each by its file's name below it."""
    if _is_model_folder(folder):
        yield ModelLocation(id=name, path=folder, source=source)
        return
    models = _gguf_models(folder)
    for path in models:
        yield ModelLocation(id=name if len(models) == 1 else f"{name}/{path.name}", path=path, source=source)


def hub_locations(cache: Path) -> Iterator[ModelLocation]:
    """Models in the hub cache: ``org/name``, and ``org/name:Q4_K_M`` for each GGUF model of a repository."""
    for repo in repositories(cache):
        yield from _repo_places(repo)


def _repo_places(repo: CachedRepo) -> Iterator[ModelLocation]:
    found = _cached_ggufs(repo)
    is_folder = repo.current is not None and (not found or any(repo.current.glob("model*.safetensors")))
    if repo.current is not None and is_folder:
        yield ModelLocation(id=repo.id, path=repo.current, source="hub")
    for label, files in labelled(found).items():
        bare = () if is_folder or len(found) > 1 else (repo.id,)
        also = (*(f"{repo.id}:{choice}" for choice in choices(label, files)), *bare)
        yield ModelLocation(id=f"{repo.id}:{label}", path=found[files] / files.names[0], source="hub", also=also)


def _cached_ggufs(repo: CachedRepo) -> dict[GgufFiles, Path]:
    """The snapshot of each GGUF model: where it is whole and compared, the current one if it can be, else any."""
    whole: dict[GgufFiles, Path] = {}
    others: dict[GgufFiles, Path] = {}
    for snapshot in (*([repo.current] if repo.current else []), *repo.older):
        names = {f"{part}{name}" for part, folder in _with_subfolders(snapshot) for name in _gguf_names(folder)}
        for files in grouped(names):
            is_whole = names.issuperset(files.names) and not any(is_unverified(snapshot / name) for name in files.names)
            (whole if is_whole else others).setdefault(files, snapshot)
    return others | whole


def _with_subfolders(snapshot: Path) -> list[tuple[str, Path]]:
    """GGUF files of a repository lie in its root, or in a folder for each quantization."""
    return [("", snapshot), *((f"{path.name}/", path) for path in _folders(snapshot))]


def path_locations(name: str) -> Iterator[ModelLocation]:
    """The file or folder of that name; a starter's id never means a folder that happens to be here."""
    path = Path(os.path.expanduser(name)).absolute()
    # Of a split model any part is enough: what is missing is said when it is read.
    if name not in STARTERS and name.strip() and any(os.path.lexists(path.parent / it) for it in parts_of(path.name)):
        found = model_path(path)
        # The whole path as its id: the folder's name alone may be that of another model.
        yield ModelLocation(id=os.path.abspath(found), path=found, source="path")


def model_path(path: Path) -> Path:
    """What to read for a file or folder: of a split model the first part, of a folder with one GGUF model that."""
    if not path.is_dir():
        return path.with_name(parts_of(path.name)[0])
    models = [] if _is_model_folder(path) else _gguf_models(path)
    return models[0] if len(models) == 1 else path


def _is_model_folder(path: Path) -> bool:
    try:
        return (path / "config.json").exists()
    except OSError:
        # Another user's folder: nothing of ours.
        return False


def _gguf_models(folder: Path) -> list[Path]:
    """The GGUF models directly in the folder; of a split one the first part, there or not."""
    return [folder / files.names[0] for files in grouped(_gguf_names(folder))]


def _gguf_names(folder: Path) -> list[str]:
    return [path.name for path in _visible(folder) if is_gguf(path.name) and not os.path.isdir(path)]


def _folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if os.path.isdir(path)]


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if _is_listable(path.name))
    except OSError:
        return []


def _is_listable(name: str) -> bool:
    """Neither hidden nor, as names of other encodings are, impossible to put into JSON."""
    return not name.startswith(".") and name.isprintable()


def read_entry(place: ModelLocation) -> ModelEntry:
    """What lies there.

    Raises:
        UnusableModelError: nothing that can be loaded; the message says why.
    """
    try:
        facts = read_facts(place.path)
        modified_at = int(os.stat(place.path).st_mtime)
    except OSError as exc:
        raise UnusableModelError(f"{place.path} cannot be read: {exc.strerror}") from exc
    return ModelEntry(id=place.id, path=place.path, source=place.source, modified_at=modified_at, **asdict(facts))


def read_facts(path: Path) -> Facts:
    """What a folder or a ``.gguf`` file says about itself, after every check that needs no loading.

    Raises:
        UnusableModelError: nothing that can be loaded; the message says why.
    """
    refuse_unverified(path)
    if path.is_dir():
        _refuse_ambiguous(path)
        return read_folder(path)
    if not is_gguf(path.name):
        raise UnusableModelError(f"{path} is no model: neither a folder with config.json nor a .gguf file")
    return read_gguf_facts(path)


def _refuse_ambiguous(folder: Path) -> None:
    models = [] if _is_model_folder(folder) else _gguf_models(folder)
    if models:
        shown = ", ".join(path.name for path in models[:NAMED_IN_ERRORS])
        raise UnusableModelError(
            f"{folder} holds {len(models)} models in GGUF; name one of them: {shown}"
            f"{', …' if len(models) > NAMED_IN_ERRORS else ''}"
        )


# Model folders


def read_folder(path: Path) -> Facts:
    """Check the folder as far as headers and lengths allow, and say what model it holds.

    Raises:
        UnusableModelError: no or unreadable ``config.json``, no, missing or damaged weights, no tokenizer, or a
            model that only code of its own could load, or with more layers than any has; or a file that is no regular
            file, or too large. The message names the file.
    """
    check_files(path)
    config = read_json(path / "config.json")
    architecture = config.get("model_type")
    _refuse_remote_code(path, config)
    if not isinstance(architecture, str) or not architecture:
        raise UnusableModelError(f"{path / 'config.json'} names no model_type")
    _refuse_endless(path, config)
    shards = _read_shards(path)
    _require_tokenizer(path)
    return Facts(
        kind=_kind(path, config, architecture),
        format="mlx",
        architecture=architecture,
        size_bytes=sum(shard.size_bytes for shard in shards),
        quantization=_quantization(config) or max(shards, key=lambda shard: shard.size_bytes).dtype,
        context_length=_context_length(path, config),
    )


def _refuse_remote_code(path: Path, config: dict[str, Any]) -> None:
    if config.get("model_file") is not None:
        raise UnusableModelError(f"{path} needs code of its own ({config['model_file']!r}), which is never run")
    if "auto_map" in config and "model_type" not in config:
        raise UnusableModelError(f"{path} needs code of its own (auto_map, and no model_type), which is never run")


def _refuse_endless(path: Path, config: dict[str, Any]) -> None:
    parts = [config]
    while parts:
        part = parts.pop()
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, most in MOST.items():
            value = part.get(key)
            if isinstance(value, int | float) and value > most:
                raise UnusableModelError(
                    f"{path / 'config.json'} has {key} {value!r:.40}; no model has more than {most}"
                )


def _read_shards(path: Path) -> list[SafetensorsSummary]:
    names = {file.name for file in path.glob("model*.safetensors")} | _indexed(path)
    counts = {int(match[1]) for name in names if (match := SHARD.fullmatch(name))}
    names |= {
        f"model-{n:05}-of-{count:05}.safetensors" for count in counts if count < 1000 for n in range(1, count + 1)
    }
    if not names:
        raise UnusableModelError(f"{path} holds no model*.safetensors (PyTorch's own files are not loaded)")
    missing = sorted(name for name in names if not (path / name).exists())
    if missing:
        raise UnusableModelError(f"{path} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}")
    return [read_summary(path / name) for name in sorted(names)]


def _indexed(path: Path) -> set[str]:
    if not (path / INDEX_NAME).exists():
        return set()
    weight_map = read_json(path / INDEX_NAME).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) and _all_text(weight_map) else {""}
    if any(Path(name).name != name or not name for name in names):
        raise UnusableModelError(f"{path / INDEX_NAME} is malformed: its weight_map must name files beside it")
    return names


def _all_text(mapping: dict[str, Any]) -> bool:
    return all(isinstance(value, str) for value in mapping.values())


def _require_tokenizer(path: Path) -> None:
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        raise UnusableModelError(f"{path} holds no tokenizer (tokenizer.json, tokenizer.model or a vocabulary)")


def read_card(path: Path) -> str:
    """The metadata at the head of the model card ``README.md``, as text; empty if there are none."""
    try:
        with open_regular(path / "README.md") as file:
            head = CARD_HEAD.match(file.read(MAX_CARD_BYTES).decode(errors="replace"))
    except (OSError, UnusableModelError):
        return ""
    return head[1] if head else ""


def _kind(path: Path, config: dict[str, Any], architecture: str) -> Kind:
    names = config.get("architectures")
    heads = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if any(name.endswith("ForSequenceClassification") for name in heads) or _is_cross_encoder(path):
        return "rerank"
    if (path / "modules.json").exists() or (path / "1_Pooling").is_dir():
        return "embedding"
    task = TASK.search(read_card(path))
    if task and task[1] in TASKS:
        return TASKS[task[1]]
    if any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in heads):
        return "chat"
    is_encoder = architecture.replace("_", "-") in {name.replace("_", "-") for name in ENCODERS}
    # A decoder that was saved without its head cannot write.
    return "embedding" if is_encoder or any(name.endswith("Model") for name in heads) else "chat"


def _is_cross_encoder(path: Path) -> bool:
    name = "config_sentence_transformers.json"
    if (path / name).exists() and read_json(path / name).get("model_type") == "CrossEncoder":
        return True
    modules = path / "modules.json"
    return modules.exists() and LOGIT_SCORE in read_regular(modules)


def _quantization(config: dict[str, Any]) -> str | None:
    """``4-bit, group 32``; a mode or method other than MLX's usual one is named in front."""
    table = next((value for value in map(config.get, ("quantization", "quantization_config")) if value), None)
    if not isinstance(table, dict):
        return None
    mode = table.get("mode", "affine") if "mode" in table or "quant_method" not in table else table["quant_method"]
    bits, group = table.get("bits"), table.get("group_size")
    parts = [f"{bits}-bit"] if isinstance(bits, int) else []
    parts += [f"group {group}"] if isinstance(group, int) else []
    return ", ".join([*([] if mode == "affine" else [str(mode)]), *parts]) or None


def _context_length(path: Path, config: dict[str, Any]) -> int | None:
    """The smaller of what the positions allow and what a sentence-transformers folder says it was trained for."""
    text = config.get("text_config")
    sources = [config, text] if isinstance(text, dict) else [config]
    limits = [s[key] for s in sources for key in CONTEXT_KEYS if _is_count(s.get(key))][:1]
    if (path / "sentence_bert_config.json").exists():
        limit = read_json(path / "sentence_bert_config.json").get("max_seq_length")
        limits += [limit] if _is_count(limit) else []
    return min(limits, default=None)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
