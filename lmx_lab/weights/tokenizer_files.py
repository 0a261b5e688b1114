"""Read the chat templates of a model, and the tokens with which it fills a gap in a text (fill-in-the-middle)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.facts import read_gguf
from lmx_lab.weights.files import read_json, read_regular
from lmx_lab.weights.gguf.header import read_header

NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
"""Names of the tokens that precede the text before the gap, the text after it, and the text in the gap."""
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
"""Names of special tokens in ``tokenizer_config.json``, and in GGUF files."""
END_NAMES = (
    *("<|endoftext|>", "<|end_of_text|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<EOT>", "▁<EOT>"),
    *("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|repo_name|>", "<repo_name>"),
)
"""Names of tokens that end the text in the gap, in addition to those that end an answer."""


def chat_templates(entry: ModelEntry) -> list[str]:
    """Return the chat templates of a model, in the order of their places; none for a model without files.

    Raises:
        UnusableModelError: the file cannot be read.
    """
    if entry.format == "gguf":
        header, name = read_gguf(entry.path), "tokenizer.chat_template"
        return [template for key in (name, f"{name}.tool_use") if (template := header.text(key)) is not None]
    return list(folder_templates(entry.path))


def main_template(entry: ModelEntry) -> str:
    """Return the first chat template of a model; empty if it has none, or if its files cannot be read."""
    try:
        return next(iter(chat_templates(entry)), "")
    except UnusableModelError:
        return ""


def special_tokens(entry: ModelEntry) -> dict[str, str]:
    """Return the texts of a model's special tokens, by their names in ``tokenizer_config.json``; empty if its files
    cannot be read.
    """
    try:
        if entry.format == "gguf":
            header = read_header(entry.path, arrays=True)
            tokens = header.items("tokenizer.ggml.tokens")
            ids = {name: header.integer(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
            return {name: str(tokens[at]) for name, at in ids.items() if at is not None and at < len(tokens)}
        config = read_json(entry.path / "tokenizer_config.json")
    except UnusableModelError:
        return {}
    given = {name: config.get(name) for name in SPECIAL_TOKENS}
    texts = {name: each.get("content") if isinstance(each, dict) else each for name, each in given.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def folder_templates(folder: Path) -> Iterator[str]:
    """Iterate over the templates in the places where transformers looks for them."""
    for path in (folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))):
        with contextlib.suppress(OSError):
            yield read_regular(path).decode(errors="replace")
    for name in ("tokenizer_config.json", "chat_template.json"):
        # Files that cannot be read are reported by the code that reads the tokenizer.
        with contextlib.suppress(UnusableModelError):
            given = read_json(folder / name).get("chat_template")
            named = given if isinstance(given, list) else [{"template": given}]
            found = [each.get("template") for each in named if isinstance(each, dict)]
            yield from (template for template in found if isinstance(template, str))


@dataclass(frozen=True)
class InfillTokens:
    """Ids of the tokens that mark the parts of a text with a gap."""

    prefix: int
    suffix: int
    middle: int
    ends: frozenset[int]
    """Tokens that end the text in the gap."""


def find_infill_tokens(id_of: Callable[[str], int | None]) -> InfillTokens | None:
    """Return the tokens of a vocabulary; None if it has none.

    Args:
        id_of: Returns the id of the token with this name, or None.
    """
    for names in NAMES:
        prefix, suffix, middle = map(id_of, names)
        if prefix is not None and suffix is not None and middle is not None:
            ends = frozenset(end for end in map(id_of, END_NAMES) if end is not None)
            return InfillTokens(prefix, suffix, middle, ends)
    return None


def gguf_infill_tokens(entry: ModelEntry) -> InfillTokens | None:
    """Return the tokens in the vocabulary of a GGUF file. Takes about 0.1 s.

    Raises:
        UnusableModelError: the file cannot be read.
    """
    tokens = read_header(entry.path, arrays=True).items("tokenizer.ggml.tokens")
    return find_infill_tokens({str(token): at for at, token in enumerate(tokens)}.get)


def can_infill(entry: ModelEntry) -> bool:
    """Return whether the files of a chat model have these tokens. The built-in echo model also fills gaps."""
    if entry.format == "echo":
        return True
    try:
        if entry.format == "gguf":
            return gguf_infill_tokens(entry) is not None
        content = read_regular(entry.path / "tokenizer.json")
    except (OSError, UnusableModelError):
        return False
    # Parsing a file of 10 MB would take a hundred times as long. JSON may contain a character or its escape sequence.
    forms = ([(json.dumps(name), json.dumps(name, ensure_ascii=False)) for name in names] for names in NAMES)
    return any(all(any(form.encode() in content for form in pair) for pair in pairs) for pairs in forms)
