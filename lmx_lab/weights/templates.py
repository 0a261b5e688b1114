"""Read the chat templates in the files of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.files import read_json, read_regular
from lmx_lab.weights.gguf.model import read_gguf


def chat_templates(entry: ModelEntry) -> list[str]:
    """Return the chat templates of a model, in the order of their places; none for a model without files.

    Raises:
        UnusableModelError: the file cannot be read.
    """
    if entry.format == "gguf":
        template = read_gguf(entry.path).text("tokenizer.chat_template")
        return [template] if template is not None else []
    return list(folder_templates(entry.path))


def main_template(entry: ModelEntry) -> str:
    """Return the first chat template of a model; empty if it has none, or if its files cannot be read."""
    try:
        return next(iter(chat_templates(entry)), "")
    except UnusableModelError:
        return ""


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
