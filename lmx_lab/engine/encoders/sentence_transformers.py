"""What the sentence-transformers files beside a model say about the way from its last layer to a vector or a score.

``modules.json`` lists modules; the first is the transformer itself, those of the others have a folder each with its
``config.json``. The keys are those of sentence-transformers 2 to 6.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.encoding import InputType
from lmx_lab.weights.files import read_regular
from lmx_lab.weights.folder import read_json

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Activation = Literal["sigmoid", "identity"]

MODES: tuple[str, ...] = get_args(PoolingMode)
OLD_POOLING_KEYS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""In the order in which several are joined to one vector."""
ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
PROMPT_NAMES: dict[InputType, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
IDLE_MODULES = frozenset({"Dropout"})


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """From the hidden states of a text's tokens to one vector; the vectors of several modes are joined."""

    modes: tuple[PoolingMode, ...]
    include_prompt: bool = True


@dataclass(frozen=True)
class Normalize:
    """To length 1."""


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A linear layer and an activation on the pooled vector; the weights are in the folder."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str
    """The last part of PyTorch's class name: ``Tanh``, ``Identity`` …"""


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    folder: Path


Step = Normalize | Dense | LayerNorm


@dataclass(frozen=True, kw_only=True)
class LogitTokens:
    """A reranker's score is the logit of one token, less that of another."""

    true: int
    false: int | None


@dataclass(frozen=True, kw_only=True)
class EncodingPrompts:
    """Texts that go before a text to embed, by the names that the model's files give them."""

    by_name: dict[str, str] = field(default_factory=dict)
    default: str | None = None

    def of(self, input_type: InputType | None) -> str:
        names = PROMPT_NAMES[input_type] if input_type is not None else ()
        named = next((name for name in names if name in self.by_name), self.default)
        return self.by_name.get(named, "") if named is not None else ""


@dataclass(frozen=True, kw_only=True)
class ChatTemplateInput:
    """The model's chat template makes the text: a query and a document are messages with roles of that name."""

    system: str = ""
    """A message before them; empty for none."""
    structured: bool = False
    """Contents are lists of typed parts, not strings."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the files want to be passed to the template."""


@dataclass(frozen=True, kw_only=True)
class SentenceTransformersConfig:
    pooling: Pooling | None
    """None where the files do not say."""
    steps: tuple[Step, ...]
    logit_tokens: LogitTokens | None
    listed: bool
    """Whether there is a list of modules at all."""
    prompts: EncodingPrompts
    lower_case: bool
    """Texts are lower-cased before anything else."""
    max_tokens: int | None
    """Of one text, special tokens included; None where the files leave it to the tokenizer."""
    chat: ChatTemplateInput | None
    """None where the files do not ask for it."""
    plain: bool
    """The files ask for texts and pairs as they are."""
    activation: Activation


def read_sentence_transformers(folder: Path) -> SentenceTransformersConfig:
    """The modules, prompts and options in a model's folder.

    Raises:
        UnusableModelError: a module, a pooling or an activation that is not known here, by its name, or a damaged file.
    """
    settings = _optional(folder / "config_sentence_transformers.json")
    transformer = _optional(folder / "sentence_bert_config.json")
    modules = _modules(folder)
    pooling: Pooling | None = None
    logit_tokens: LogitTokens | None = None
    steps: list[Step] = []
    for name, path in modules:
        match name:
            case "Pooling":
                pooling = _pooling(path / "config.json")
            case "LogitScore":
                logit_tokens = _logit_tokens(path / "config.json")
            case _ if name not in IDLE_MODULES:
                steps.append(_step(name, path))
    prompts = _prompts(settings)
    return SentenceTransformersConfig(
        pooling=pooling,
        steps=tuple(steps),
        logit_tokens=logit_tokens,
        listed=bool(modules),
        prompts=prompts,
        lower_case=transformer.get("do_lower_case") is True,
        max_tokens=_count(transformer.get("max_seq_length")),
        chat=_chat(transformer, prompts.of(None)),
        plain="message" not in transformer.get("modality_config", ["message"]),
        activation=_activation(settings, read_json(folder / "config.json")),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Class and folder of each module behind the transformer."""
    path = folder / "modules.json"
    if not path.exists():
        return [(found.name.split("_", 1)[1], found) for found in sorted(folder.glob("[1-9]_*/")) if found.is_dir()]
    try:
        listed = json.loads(read_regular(path))
        modules = [(str(module["type"]), str(module["path"])) for module in listed]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as exc:
        raise UnusableModelError(f"{path} is no list of modules with a type and a path: {exc!r}") from exc
    for kind, name in modules:
        if not kind.startswith("sentence_transformers."):
            raise UnusableModelError(f"{path} needs code of its own ({kind}), which is never run")
        if Path(name).name != name or (kind.endswith(".Transformer") and name):
            raise UnusableModelError(f"{path} keeps {kind} in {name!r}; modules must lie in folders beside it")
    found = [(kind.rsplit(".", 1)[1], folder / name) for kind, name in modules]
    return [(kind, path) for kind, path in found if kind != "Transformer"]


def _pooling(path: Path) -> Pooling:
    config = read_json(path)
    named = config.get("pooling_mode")
    if named is None:
        modes: list[Any] = [mode for key, mode in OLD_POOLING_KEYS.items() if config.get(key)] or ["mean"]
    else:
        modes = [named] if isinstance(named, str) else list(named)
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise UnusableModelError(f"{path} wants the pooling {unknown[0]!r}; known are {', '.join(MODES)}")
    return Pooling(modes=tuple(modes), include_prompt=config.get("include_prompt") is not False)


def _step(name: str, folder: Path) -> Step:
    match name:
        case "Normalize":
            return Normalize()
        case "LayerNorm":
            return LayerNorm(folder=folder)
        case "Dense":
            config = read_json(folder / "config.json")
            if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != (
                "sentence_embedding"
            ):
                raise UnusableModelError(f"{folder} is a dense module of a kind that is not known here")
            return Dense(
                folder=folder,
                inputs=_size(config, "in_features", folder),
                outputs=_size(config, "out_features", folder),
                bias=config.get("bias") is not False,
                activation=str(config.get("activation_function", "Tanh")).rsplit(".", 1)[-1],
            )
    raise UnusableModelError(f"modules.json names the module {name}, which is not known here")


def _logit_tokens(path: Path) -> LogitTokens:
    config = read_json(path)
    false = None if config.get("false_token_id") is None else _size(config, "false_token_id", path)
    return LogitTokens(true=_size(config, "true_token_id", path), false=false)


def _size(config: dict[str, Any], key: str, where: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UnusableModelError(f"{where} gives {key} as {value!r}; it must be a number from 0 up")
    return value


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _prompts(settings: dict[str, Any]) -> EncodingPrompts:
    table = settings.get("prompts")
    by_name = {name: text for name, text in table.items() if isinstance(text, str)} if isinstance(table, dict) else {}
    default = settings.get("default_prompt_name")
    return EncodingPrompts(by_name=by_name, default=default if isinstance(default, str) else None)


def _chat(transformer: dict[str, Any], system: str) -> ChatTemplateInput | None:
    kinds = transformer.get("modality_config")
    if not isinstance(kinds, dict) or not isinstance(kinds.get("message"), dict):
        return None
    processing = transformer.get("processing_kwargs")
    options = processing.get("chat_template") if isinstance(processing, dict) else None
    options = {key: value for key, value in (options or {}).items() if key != "restore_suffix"}
    return ChatTemplateInput(system=system, structured=kinds["message"].get("format") == "structured", options=options)


def _activation(settings: dict[str, Any], config: dict[str, Any]) -> Activation:
    """Of a reranker's score. Three generations of files keep its name in three places."""
    inner = config.get("sentence_transformers")
    named = (
        settings.get("activation_fn")
        or (inner.get("activation_fn") if isinstance(inner, dict) else None)
        or config.get("sbert_ce_default_activation_function")
        or "torch.nn.Sigmoid"
    )
    found = ACTIVATIONS.get(str(named).rsplit(".", 1)[-1])
    if found is None or not str(named).startswith("torch.nn."):
        raise UnusableModelError(f"its files name the activation {named}; known are Sigmoid and Identity of torch.nn")
    return found
