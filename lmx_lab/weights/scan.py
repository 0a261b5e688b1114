"""Find the models on this disk, and read their properties from their files, without loading them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import Facts, Kind, ModelEntry, QuantizedCopy, Source
from lmx_lab.weights.config_check import check_config
from lmx_lab.weights.files import check_files, open_regular, read_json, read_regular
from lmx_lab.weights.gguf.model import read_gguf_facts
from lmx_lab.weights.gguf.names import GgufFiles, choices_for, group_files, is_gguf, label_models, parts_of
from lmx_lab.weights.hub import CachedRepo, is_unverified, repositories, require_verified
from lmx_lab.weights.safetensors_header import SafetensorsSummary, read_summary
from lmx_lab.weights.starters import find_starter

NAMED_IN_ERRORS = 6
INDEX_NAME = "model.safetensors.index.json"
SOURCE_NAME = "converted_from.json"
MAX_CARD_BYTES = 64 * 2**10
CARD_HEAD = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
TASK = re.compile(r"^pipeline_tag:\s*['\"]?([\w-]+)", re.MULTILINE)
SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")

ENCODERS = frozenset({
    "bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "distilbert", "mpnet", "modernbert", "nomic_bert",
    "electra", "deberta", "deberta-v2", "albert", "eurobert", "new",
})  # fmt: skip
LOGIT_SCORE = b'.LogitScore"'
"""How ``modules.json`` names the module of rerankers that compare the logits of two tokens."""
TASKS: dict[str, Kind] = {
    "text-ranking": "rerank",
    "feature-extraction": "embedding",
    "sentence-similarity": "embedding",
}
"""Kinds of models by the ``pipeline_tag`` of the model card, for decoders whose other files leave it open."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True, kw_only=True)
class ModelLocation:
    """A place where a model may be. Nothing in it was read yet."""

    id: str
    path: Path
    source: Source
    aliases: tuple[str, ...] = ()
    """As in ``ModelEntry``."""
    converted_from: Path | None = None
    """The GGUF file from which the model was converted, if the file has not changed since."""
    family: str | None = None
    """The origin that the formats of one model share: the starter, or the file that was converted. Other models with
    the same id are different models."""
    copy: QuantizedCopy | None = None
    """As in ``ModelEntry``."""

    def has_alias(self, name: str) -> bool:
        """Whether the name is one of the aliases."""
        return name.casefold() in (alias.casefold() for alias in self.aliases)

    def is_format_of(self, other: ModelLocation) -> bool:
        """Whether both are the same model, in the same or in different formats."""
        return self == other or (self.family is not None and (self.id, self.family) == (other.id, other.family))


def store_locations(models: Path) -> Iterator[ModelLocation]:
    """Find the models in the lab's own folder. The formats of a starter have the starter's id."""
    for location in folder_locations(models, "store"):
        yield store_location(location.path, location.id)


def store_location(path: Path, name: str) -> ModelLocation:
    """Return the location of a model in the lab's own folder, whose folder there has this name."""
    starter = find_starter(name)
    if starter is None:
        return ModelLocation(id=name, path=path, source="store", converted_from=read_source(path))
    aliases = () if name == starter.id else (name,)
    return ModelLocation(id=starter.id, path=path, source="store", aliases=aliases, family=f"starter {starter.id}")


def join_formats(locations: Iterable[ModelLocation]) -> list[ModelLocation]:
    """Return the locations, with the id of the GGUF file for each model that was converted from one of them.

    Of two locations with the same path, the first is used.
    """
    found = list(locations)
    files = {location.path: location for location in reversed(found)}
    sources = {location.converted_from for location in found} & files.keys()
    return [_joined(location, files, sources) for location in found]


def _joined(
    location: ModelLocation, files: Mapping[Path, ModelLocation], sources: AbstractSet[Path | None]
) -> ModelLocation:
    if location.path in sources:
        return replace(location, family=location.family or f"file {location.path}")
    file = files.get(location.converted_from) if location.converted_from is not None else None
    if file is None:
        return location
    joined = replace(
        location,
        id=file.id,
        aliases=(location.id, *location.aliases),
        family=file.family or f"file {file.path}",
    )
    return joined if location.copy is None else _named_copy(joined, location.copy, file)


def _named_copy(location: ModelLocation, copy: QuantizedCopy, file: ModelLocation) -> ModelLocation:
    """Return the location of a quantized copy with all of its names.

    Aliases of a file of the hub are other spellings of its id. Those of other files mean the file itself.
    """
    spellings = file.aliases if copy.automatic and file.source == "hub" else ()
    aliases = (f"{file.id}:{copy.type}", *location.aliases, *spellings)
    return replace(location, source=file.source, aliases=aliases)


def write_source(folder: Path, name: str, source: Path) -> None:
    """Record in the folder of a converted model from which file it was converted.

    Args:
        name: Name of the folder in the store. Copies of the folder are other models.
    """
    (folder / SOURCE_NAME).write_text(json.dumps(_source_record(name, source)))


def read_source(folder: Path) -> Path | None:
    """Return the file from which a model was converted; None if it was not, or the file has changed."""
    try:
        record = read_json(folder / SOURCE_NAME)
        source = Path(record["path"])
        return source if record == _source_record(folder.name, source) else None
    except (OSError, UnusableModelError, KeyError, TypeError, ValueError):
        return None


def _source_record(name: str, source: Path) -> dict[str, str | int]:
    status = os.stat(source)
    return {
        "name": name,
        "path": str(source.absolute()),
        "size_bytes": status.st_size,
        "changed_ns": status.st_mtime_ns,
    }


def folder_locations(folder: Path, source: Source) -> Iterator[ModelLocation]:
    """Find the models in a folder, or the folder itself as a model.

    Their ids are the names of files and folders; one level below, they are ``org/name``.
    """
    if _is_model_folder(folder):
        yield ModelLocation(id=folder.name, path=folder, source=source)
        return
    for path in _gguf_models(folder):
        yield ModelLocation(id=path.name, path=path, source=source)
    for path in _folders(folder):
        yield from _subfolder_locations(path, path.name, source)
        if not _is_model_folder(path):
            for below in _folders(path):
                yield from _subfolder_locations(below, f"{path.name}/{below.name}", source)


def _subfolder_locations(folder: Path, name: str, source: Source) -> Iterator[ModelLocation]:
    """Return the only model of a folder by the folder's name, or each of several GGUF models by its file's name."""
    if _is_model_folder(folder):
        yield ModelLocation(id=name, path=folder, source=source)
        return
    models = _gguf_models(folder)
    for path in models:
        yield ModelLocation(id=name if len(models) == 1 else f"{name}/{path.name}", path=path, source=source)


def hub_locations(cache: Path) -> Iterator[ModelLocation]:
    """Find models in the hub cache: ``org/name``, and ``org/name:Q4_K_M`` for each GGUF model of a repository."""
    for repo in repositories(cache):
        yield from _repo_locations(repo)


def _repo_locations(repo: CachedRepo) -> Iterator[ModelLocation]:
    found = _cached_ggufs(repo)
    is_folder = repo.current is not None and (not found or any(repo.current.glob("model*.safetensors")))
    if repo.current is not None and is_folder:
        yield ModelLocation(id=repo.id, path=repo.current, source="hub")
    for label, files in label_models(found).items():
        bare = () if is_folder or len(found) > 1 else (repo.id,)
        aliases = (*(f"{repo.id}:{choice}" for choice in choices_for(label, files)), *bare)
        path = found[files] / files.names[0]
        yield ModelLocation(id=f"{repo.id}:{label}", path=path, source="hub", aliases=aliases)


def _cached_ggufs(repo: CachedRepo) -> dict[GgufFiles, Path]:
    """Return a snapshot for each GGUF model: a complete and verified one if possible, and a newer one first."""
    whole: dict[GgufFiles, Path] = {}
    others: dict[GgufFiles, Path] = {}
    for snapshot in (*([repo.current] if repo.current else []), *repo.older):
        names = {f"{part}{name}" for part, folder in _with_subfolders(snapshot) for name in _gguf_names(folder)}
        for files in group_files(names):
            is_whole = names.issuperset(files.names) and not any(is_unverified(snapshot / name) for name in files.names)
            (whole if is_whole else others).setdefault(files, snapshot)
    return others | whole


def _with_subfolders(snapshot: Path) -> list[tuple[str, Path]]:
    """Return the snapshot and its subfolders: repositories may have a folder for each quantization."""
    return [("", snapshot), *((f"{path.name}/", path) for path in _folders(snapshot))]


def path_locations(name: str) -> Iterator[ModelLocation]:
    """Return the file or folder of that name. A starter's id never refers to a folder of the same name."""
    path = Path(os.path.expanduser(name)).absolute()
    # Any part of a split model will do. If others are missing, the error is raised when the model is read.
    if (
        find_starter(name) is None
        and name.strip()
        and any(os.path.lexists(path.parent / it) for it in parts_of(path.name))
    ):
        found = model_path(path)
        # The whole path is the id: another model may have the name of the folder.
        yield ModelLocation(id=os.path.abspath(found), path=found, source="path")


def model_path(path: Path) -> Path:
    """Return the file to read: the first part of a split model, or the only GGUF model of a folder."""
    if not path.is_dir():
        return path.with_name(parts_of(path.name)[0])
    models = [] if _is_model_folder(path) else _gguf_models(path)
    return models[0] if len(models) == 1 else path


def _is_model_folder(path: Path) -> bool:
    try:
        return (path / "config.json").exists()
    except OSError:
        # The folder belongs to another user.
        return False


def _gguf_models(folder: Path) -> list[Path]:
    """Return the GGUF models directly in the folder. A split one is listed by its first part, which may be missing."""
    return [folder / files.names[0] for files in group_files(_gguf_names(folder))]


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
    """Whether the name is not hidden and can be written as JSON, unlike names in other encodings."""
    return not name.startswith(".") and name.isprintable()


def read_entry(location: ModelLocation) -> ModelEntry:
    """Read the entry of a model.

    Raises:
        UnusableModelError: there is no model that can be loaded; the message contains the reason.
    """
    try:
        facts = read_facts(location.path)
        modified_at = int(os.stat(location.path).st_mtime)
    except OSError as exc:
        raise UnusableModelError(f"{location.path} cannot be read: {exc.strerror}; check its permissions") from exc
    return ModelEntry(
        id=location.id,
        path=location.path,
        source=location.source,
        aliases=location.aliases,
        copy=location.copy,
        modified_at=modified_at,
        **asdict(facts),
    )


def read_facts(path: Path) -> Facts:
    """Read the properties of the model in a folder or a ``.gguf`` file, after all checks that need no load.

    Raises:
        UnusableModelError: it cannot be loaded; the message contains the reason.
    """
    require_verified(path)
    if path.is_dir():
        _refuse_ambiguous(path)
        return read_folder(path)
    if not is_gguf(path.name):
        raise UnusableModelError(f"{path} is neither a folder with config.json nor a .gguf file; name one of these")
    return read_gguf_facts(path)


def _refuse_ambiguous(folder: Path) -> None:
    models = [] if _is_model_folder(folder) else _gguf_models(folder)
    if models:
        shown = ", ".join(path.name for path in models[:NAMED_IN_ERRORS])
        raise UnusableModelError(
            f"{folder} contains {len(models)} GGUF models; name one of them: {shown}"
            f"{', …' if len(models) > NAMED_IN_ERRORS else ''}"
        )


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
    _refuse_remote_code(path, config)
    if not isinstance(architecture, str) or not architecture:
        raise UnusableModelError(f"{path / 'config.json'} has no model_type; fetch the model again, or use another")
    check_config(path / "config.json", config)
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
        raise UnusableModelError(
            f"{path} requires custom code ({config['model_file']!r}), which is never run; use another model"
        )
    if "auto_map" in config and "model_type" not in config:
        raise UnusableModelError(
            f"{path} requires custom code (auto_map without model_type), which is never run; use another"
        )


def _read_shards(path: Path) -> list[SafetensorsSummary]:
    names = {file.name for file in path.glob("model*.safetensors")} | _names_in_index(path)
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


def _names_in_index(path: Path) -> set[str]:
    if not (path / INDEX_NAME).exists():
        return set()
    weight_map = read_json(path / INDEX_NAME).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) and _all_text(weight_map) else {""}
    if any(Path(name).name != name or not name for name in names):
        raise UnusableModelError(
            f"{path / INDEX_NAME} is invalid: its weight_map must name files beside it; fetch it again"
        )
    return names


def _all_text(mapping: dict[str, Any]) -> bool:
    return all(isinstance(value, str) for value in mapping.values())


def _require_tokenizer(path: Path) -> None:
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        raise UnusableModelError(
            f"{path} contains no tokenizer (tokenizer.json, tokenizer.model or a vocabulary); fetch it again"
        )


def read_card(path: Path) -> str:
    """Return the metadata at the beginning of the model card ``README.md`` as text; empty if there is none."""
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
    # A decoder that was saved without its head cannot generate text.
    return "embedding" if is_encoder or any(name.endswith("Model") for name in heads) else "chat"


def _is_cross_encoder(path: Path) -> bool:
    name = "config_sentence_transformers.json"
    if (path / name).exists() and read_json(path / name).get("model_type") == "CrossEncoder":
        return True
    modules = path / "modules.json"
    return modules.exists() and LOGIT_SCORE in read_regular(modules)


def _quantization(config: dict[str, Any]) -> str | None:
    """Return a description such as ``4-bit, group 32``, after the mode or method if it is not MLX's default."""
    table = next((value for value in map(config.get, ("quantization", "quantization_config")) if value), None)
    if not isinstance(table, dict):
        return None
    mode = table.get("mode", "affine") if "mode" in table or "quant_method" not in table else table["quant_method"]
    bits, group = table.get("bits"), table.get("group_size")
    parts = [f"{bits}-bit"] if isinstance(bits, int) else []
    parts += [f"group {group}"] if isinstance(group, int) else []
    return ", ".join([*([] if mode == "affine" else [str(mode)]), *parts]) or None


def _context_length(path: Path, config: dict[str, Any]) -> int | None:
    """Return the smaller of the position limit and the length that sentence-transformers files define."""
    text = config.get("text_config")
    sources = [config, text] if isinstance(text, dict) else [config]
    limits = [s[key] for s in sources for key in CONTEXT_KEYS if _is_count(s.get(key))][:1]
    if (path / "sentence_bert_config.json").exists():
        limit = read_json(path / "sentence_bert_config.json").get("max_seq_length")
        limits += [limit] if _is_count(limit) else []
    return min(limits, default=None)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
