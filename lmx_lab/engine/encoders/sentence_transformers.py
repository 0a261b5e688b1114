"""Read the sentence-transformers files of a model: how its hidden states become a vector or a score.

``modules.json`` lists the modules. The first is the transformer itself; each of the others has a folder with a
``config.json``. The keys are those of sentence-transformers 2 to 6.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lmx_lab.engine.encoders.layers import Pooling, PoolingMode
from lmx_lab.errors import UnusableModelError
from lmx_lab.values.outputs import InputType
from lmx_lab.weights.files import read_json, read_regular

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
"""Keys of the pooling modes, in the order in which the vectors of several modes are concatenated."""
ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
PROMPT_NAMES: dict[InputType, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
IGNORED_MODULES = frozenset({"Dropout"})


@dataclass(frozen=True, kw_only=True)
class EncodingPrompts:
    """Prompts that are put before texts, by their names in the model's files."""

    by_name: dict[str, str] = field(default_factory=dict)
    default: str | None = None
    """Name of the prompt that is used if no input type is given."""

    def prompt_for(self, input_type: InputType | None) -> str:
        """Return the prompt of an input type, or the default one; empty if the model has none."""
        names = PROMPT_NAMES[input_type] if input_type is not None else ()
        named = next((name for name in names if name in self.by_name), self.default)
        return self.by_name.get(named, "") if named is not None else ""


@dataclass(frozen=True, kw_only=True)
class ChatTemplateInput:
    """How query and document are passed to the model's chat template: as messages with roles of these names."""

    system: str = ""
    """Text of a system message before them; empty for none."""
    structured: bool = False
    """Whether contents are lists of typed parts instead of strings."""
    options: dict[str, Any] = field(default_factory=dict)
    """Variables of the template that the files define."""


@dataclass(frozen=True, kw_only=True)
class SentenceTransformersConfig:
    """The contents of a model's sentence-transformers files."""

    pooling: Pooling | None
    """None if the files do not define it."""
    modules: tuple[tuple[str, Path], ...]
    """Class and folder of the modules after the pooling."""
    logit_tokens: tuple[int, int | None] | None
    """The tokens whose logits make the score of a reranker: the logit of the first, minus that of the second if given.
    """
    has_modules: bool
    """Whether the files define any modules."""
    prompts: EncodingPrompts
    lower_case: bool
    """Whether texts are lower-cased before anything else."""
    max_tokens: int | None
    """Largest number of tokens of one text, including special ones; None if the tokenizer defines it."""
    chat: ChatTemplateInput | None
    """Set if the files require the chat template."""
    plain: bool
    """Whether the files require texts and pairs without a chat template."""
    activation: Activation
    """The activation of a reranker's score."""


def read_sentence_transformers(folder: Path) -> SentenceTransformersConfig:
    """Read the modules, prompts and options in a model's folder.

    Raises:
        UnusableModelError: a file is damaged, or names a module, a pooling or an activation that is not supported.
    """
    settings = _optional(folder / "config_sentence_transformers.json")
    transformer = _optional(folder / "sentence_bert_config.json")
    listed = _list_modules(folder)
    pooling: Pooling | None = None
    logit_tokens: tuple[int, int | None] | None = None
    modules: list[tuple[str, Path]] = []
    for name, path in listed:
        match name:
            case "Pooling":
                place = path / "config.json"
                config = read_json(place)
                named = config.get("pooling_mode")
                modes: list[Any] = [named] if isinstance(named, str) else list(named or ())
                if named is None:
                    modes = [mode for key, mode in OLD_POOLING_KEYS.items() if config.get(key)] or ["mean"]
                if unknown := [mode for mode in modes if mode not in MODES]:
                    raise UnusableModelError(
                        f"{place}: the pooling {unknown[0]!r} is not supported; supported are {', '.join(MODES)}"
                    )
                pooling = Pooling(modes=tuple(modes), include_prompt=config.get("include_prompt") is not False)
            case "LogitScore":
                place = path / "config.json"
                config = read_json(place)
                false = None if config.get("false_token_id") is None else _size(config, "false_token_id", place)
                logit_tokens = _size(config, "true_token_id", place), false
            case _ if name not in IGNORED_MODULES:
                modules.append((name, path))
    table, default = settings.get("prompts"), settings.get("default_prompt_name")
    by_name = {name: text for name, text in table.items() if isinstance(text, str)} if isinstance(table, dict) else {}
    prompts = EncodingPrompts(by_name=by_name, default=default if isinstance(default, str) else None)
    chat: ChatTemplateInput | None = None
    kinds, processing = transformer.get("modality_config"), transformer.get("processing_kwargs")
    if isinstance(kinds, dict) and isinstance(kinds.get("message"), dict):
        options = (processing.get("chat_template") if isinstance(processing, dict) else None) or {}
        chat = ChatTemplateInput(
            system=prompts.prompt_for(None),
            structured=kinds["message"].get("format") == "structured",
            options={key: value for key, value in options.items() if key != "restore_suffix"},
        )
    max_tokens = transformer.get("max_seq_length")
    is_limited = isinstance(max_tokens, int) and not isinstance(max_tokens, bool) and max_tokens > 0
    return SentenceTransformersConfig(
        pooling=pooling,
        modules=tuple(modules),
        logit_tokens=logit_tokens,
        has_modules=bool(listed),
        prompts=prompts,
        lower_case=transformer.get("do_lower_case") is True,
        max_tokens=max_tokens if is_limited else None,
        chat=chat,
        plain="message" not in transformer.get("modality_config", ["message"]),
        activation=_find_activation(settings, read_json(folder / "config.json")),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _list_modules(folder: Path) -> list[tuple[str, Path]]:
    """Return class and folder of each module after the transformer."""
    path = folder / "modules.json"
    if not path.exists():
        return [(found.name.split("_", 1)[1], found) for found in sorted(folder.glob("[1-9]_*/")) if found.is_dir()]
    try:
        listed = json.loads(read_regular(path))
        modules = [(str(module["type"]), str(module["path"])) for module in listed]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as exc:
        raise UnusableModelError(f"{path} is not a list of modules with a type and a path: {exc!r}") from exc
    for kind, name in modules:
        if not kind.startswith("sentence_transformers."):
            raise UnusableModelError(f"{path} requires custom code ({kind}), which is never run")
        if Path(name).name != name or (kind.endswith(".Transformer") and name):
            raise UnusableModelError(f"{path} has {kind} in {name!r}; modules must be in folders beside it")
    found = [(kind.rsplit(".", 1)[1], folder / name) for kind, name in modules]
    return [(kind, path) for kind, path in found if kind != "Transformer"]


def _size(config: dict[str, Any], key: str, where: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UnusableModelError(f"{where}: {key} is {value!r}; it must be an integer of at least 0")
    return value


def _find_activation(settings: dict[str, Any], config: dict[str, Any]) -> Activation:
    """Return the activation of a reranker's score. Three generations of files contain it in three places."""
    inner = config.get("sentence_transformers")
    named = (
        settings.get("activation_fn")
        or (inner.get("activation_fn") if isinstance(inner, dict) else None)
        or config.get("sbert_ce_default_activation_function")
        or "torch.nn.Sigmoid"
    )
    found = ACTIVATIONS.get(str(named).rsplit(".", 1)[-1])
    if found is None or not str(named).startswith("torch.nn."):
        raise UnusableModelError(
            f"its files name the activation {named}; supported are Sigmoid and Identity of torch.nn"
        )
    return found
