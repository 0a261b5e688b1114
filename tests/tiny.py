"""Write tiny models for tests and benchmarks, which take milliseconds per token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

TINY_CONTEXT = 512


def write_tiny_llama(folder: Path, tokenizer_from: Path, *, seed: int, context: int = TINY_CONTEXT) -> None:
    """Write a fast llama with 2 layers, width 32 and random float32 weights, whose text is meaningless."""
    width, hidden, heads, vocabulary = 32, 64, 2, 49152
    random = np.random.default_rng(seed)

    def weight(*shape: int) -> npt.NDArray[np.float32]:
        return random.normal(0, 0.3, shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": weight(vocabulary, width), "model.norm.weight": np.ones(width, np.float32)}
    for layer in (f"model.layers.{i}" for i in range(2)):
        for name in ("q", "k", "v", "o"):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = weight(width, width)
        weights[f"{layer}.mlp.gate_proj.weight"] = weight(hidden, width)
        weights[f"{layer}.mlp.up_proj.weight"] = weight(hidden, width)
        weights[f"{layer}.mlp.down_proj.weight"] = weight(width, hidden)
        weights[f"{layer}.input_layernorm.weight"] = np.ones(width, np.float32)
        weights[f"{layer}.post_attention_layernorm.weight"] = np.ones(width, np.float32)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "eos_token_id": [2],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)


# As in Qwen3's tokenizer: added tokens; those that mark reasoning and calls are not special tokens.
MARKERS = {
    "<repo_name>": "<think>",
    "<reponame>": "</think>",
    "<file_sep>": "<tool_call>",
    "<filename>": "</tool_call>",
}
THINKER_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if reasoning_effort is defined %}({{ reasoning_effort }}) {% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif open_thoughts %}<think>
{% endif %}
{%- endif %}"""


def teach_thinking(folder: Path, *, special: bool = False, template: str = THINKER_TEMPLATE) -> None:
    """Add tokens that mark reasoning and calls to a tiny model, and a chat template with tools and reasoning.

    Args:
        special: Whether these tokens are special tokens.
    """
    rename_tokens(folder, MARKERS, special=special)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "chat_template": template}), encoding="utf-8")


def rename_tokens(folder: Path, names: Mapping[str, str], *, special: bool = False) -> None:
    """Give added tokens of a tiny model other names.

    Args:
        special: Whether they become special tokens.
    """
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    for token in tokenizer["added_tokens"]:
        if token["content"] in names:
            token.update(content=names[token["content"]], special=special)
    vocabulary = tokenizer["model"]["vocab"]
    for old, new in names.items():
        vocabulary[new] = vocabulary.pop(old)
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
