"""Write tiny models with one harmful value in their tokenizer, chat template or configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soak.fuzzing.values import Raw, to_json
from soak.models import is_installed, tiny
from soak.report import Soak
from tests.support.gguf import with_template
from tests.support.models import THINKER_TEMPLATE, teach_thinking, write_tiny_bert, write_tiny_llama

CONTEXT_TOKENS = 8192
LOOPS = "".join(f"{{% for {name} in range(99999) %}}" for name in "abcd") + "{% endfor %}" * 4
LOOP_OF_TWO = f"{{% if messages|length == 2 %}}{LOOPS}{{% endif %}}{THINKER_TEMPLATE}"
"""Does not end for a conversation of two messages, which a trial with one message does not detect."""
LOOP_WORD = "loop"
LOOP_OF_WORD = f"{{% if messages[0].content == '{LOOP_WORD}' %}}{LOOPS}{{% endif %}}{THINKER_TEMPLATE}"
"""Does not end for one particular request, which no trial can detect."""
DOUBLING = "{% set ns = namespace(s='x') %}{% for _ in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
POWER = f"{{{{ 9**(9**9) }}}}{THINKER_TEMPLATE}"
SLOW_NORMALIZER = {"type": "Replace", "pattern": {"Regex": "(a|a|aa|b)*c"}, "content": ""}
SLOW_PIECES = {
    "type": "Split",
    "pattern": {"Regex": "(([a-z])+.)+[A-Z]([a-z])+$"},
    "behavior": "Isolated",
    "invert": False,
}
VALID, EMBEDDER, NORMALIZER, PIECES = "valid", "embedder", "slow normalizer", "slow pre-tokenizer"
LARGE_TEMPLATE = "{% if 1 %}{% endif %}" * 30_000 + THINKER_TEMPLATE
"""A template of 0.6 MB, which takes seconds to compile."""
LARGE = "a template of 0.6 MB"
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "NaN in config.json": {"rms_norm_eps": Raw("NaN")},
    "infinity in config.json": {"rope_theta": Raw("Infinity")},
    "0 bits": {"quantization": {"group_size": 32, "bits": 0}},
    "2,147,483,648 layers": {"num_hidden_layers": 2**31},
    "10^12 columns": {"hidden_size": 10**12},
}
"""Changed values of ``config.json``."""
TEMPLATES: Mapping[str, str] = {
    "a template that loops for two messages": LOOP_OF_TWO,
    "a template that doubles a text": DOUBLING,
    "a template of 9**(9**9)": POWER,
}


def write_hostile_models(folder: Path, soak: Soak) -> dict[str, Path]:
    """Write all models below a folder; return the folder or file of each, by its name."""
    models = {
        VALID: _llama(folder / "valid", soak),
        EMBEDDER: write_tiny_bert(folder / "embedder").path,
        NORMALIZER: _llama(folder / "normalizer", soak, template=LOOP_OF_WORD, normalizer=SLOW_NORMALIZER),
        PIECES: _llama(folder / "pieces", soak, pre_tokenizer=SLOW_PIECES),
    }
    for number, (name, values) in enumerate(CONFIGS.items()):
        models[name] = _llama(folder / f"config-{number}", soak)
        config = models[name] / "config.json"
        config.write_text(to_json(json.loads(config.read_text()) | values))
    if is_installed("llama.cpp"):
        models[LARGE] = with_template(tiny(soak, "llama.cpp"), LARGE_TEMPLATE, folder / "gguf-large")
    for number, (name, template) in enumerate(TEMPLATES.items()):
        models[name] = _llama(folder / f"template-{number}", soak, template=template)
        if is_installed("llama.cpp"):
            models[f"{name}, GGUF"] = with_template(tiny(soak, "llama.cpp"), template, folder / f"gguf-{number}")
    return models


def _llama(folder: Path, soak: Soak, *, template: str = THINKER_TEMPLATE, **steps: Any) -> Path:
    """Write a tiny llama.

    Args:
        steps: Steps for ``tokenizer.json``, by kind. Each is inserted before the tokenizer's own step of this kind.
    """
    write_tiny_llama(folder, soak.folder, seed=0, context=CONTEXT_TOKENS)
    teach_thinking(folder, template=template)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for name, step in steps.items():
        others = [tokenizer[name]] if tokenizer[name] else []
        several = "pretokenizers" if name == "pre_tokenizer" else "normalizers"
        tokenizer[name] = {"type": "Sequence", several: [step, *others]}
    path.write_text(json.dumps(tokenizer))
    return folder
