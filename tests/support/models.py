"""Write tiny models with random weights, which take milliseconds per token or batch."""

from __future__ import annotations

import importlib
import json
import shutil
import struct
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from lmx_lab.engine.sandbox import shared_pool
from lmx_lab.values.engine import EngineSnapshot, ModelState
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.outputs import Vectors
from lmx_lab.weights.facts import read_folder

# Imported by the function that needs it, because it imports mlx-lm, and fast tests import this file.
if TYPE_CHECKING:
    from lmx_lab.engine.encoders.loading import LoadedEncoder
    from lmx_lab.engine.texts import TextTokens

Tensors = dict[str, npt.NDArray[np.float32]]
TINY_ENTRY = ModelEntry(
    id="tiny",
    path=Path("/models/tiny"),
    kind="chat",
    architecture="llama",
    format="mlx",
    size_bytes=7,
    quantization=None,
    context_length=512,
    source="store",
)
"""A model that does not exist, for tests that do not load it."""


def in_memory(main: ModelEntry | None, *pinned: ModelEntry, **numbers: Any) -> EngineSnapshot:
    """Return the state of a lab with these models; ``numbers`` are fields of the main model's or of the whole state."""
    whole = EngineSnapshot.__dataclass_fields__
    of_model = {name: numbers.pop(name) for name in list(numbers) if name not in whole}
    others = tuple(ModelState(entry=entry, memory_bytes=1, pinned=True) for entry in pinned)
    if main is None:
        return EngineSnapshot(models=others, **numbers)
    state = ModelState(entry=main, **{"memory_bytes": 1, **of_model})
    return EngineSnapshot(state="ready", models=(*others, state), main=state, **numbers)


TINY_CONTEXT = 512


def decoder_weights(
    *, seed: int, words: int, width: int, inner: int, heads: int, kv_heads: int, head_size: int, qk_norm: bool = False
) -> Tensors:
    """Return random weights of two layers; with ``qk_norm`` also the norms of queries and keys."""
    random = np.random.default_rng(seed)

    def weight(*shape: int) -> npt.NDArray[np.float32]:
        return random.normal(0, 0.3, shape).astype(np.float32)

    tensors = {"embed_tokens.weight": weight(words, width), "norm.weight": np.ones(width, np.float32)}
    for layer in (f"layers.{at}" for at in range(2)):
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = weight(count * head_size, width)
        tensors[f"{layer}.self_attn.o_proj.weight"] = weight(width, heads * head_size)
        for name in ("q_norm", "k_norm") if qk_norm else ():
            tensors[f"{layer}.self_attn.{name}.weight"] = np.ones(head_size, np.float32)
        for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = np.ones(width, np.float32)
    return tensors


def write_tiny_llama(
    folder: Path,
    tokenizer_from: Path,
    *,
    seed: int,
    context: int = TINY_CONTEXT,
    heads: int = 2,
    head_size: int = 16,
) -> None:
    """Write a fast llama with 2 layers, width 32 and random float32 weights, whose text is meaningless.

    Args:
        heads, head_size: The KV cache of a token has 16 bytes for each number of these heads.
    """
    width, hidden, vocabulary = 32, 64, 49152
    weights = decoder_weights(
        seed=seed, words=vocabulary, width=width, inner=hidden, heads=heads, kv_heads=heads, head_size=head_size
    )
    folder.mkdir(parents=True)
    named = {f"model.{name}": each for name, each in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "mlx"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_size,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "eos_token_id": [2],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)


def write_huge_llama(folder: Path, tiny: Path, *, inner: int = 80_000_000) -> ModelEntry:
    """Write a model like ``tiny`` whose files are as large as their headers state, 61 GB, but have no content and use
    no disk space.

    Args:
        inner: Width of its feed-forward networks.
    """
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder / name)
    _change(folder / "config.json", intermediate_size=inner)
    with (tiny / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    end = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            tensor["shape"] = [inner if ".mlp." in name and length == 64 else length for length in tensor["shape"]]
            end, start = end + 4 * int(np.prod(tensor["shape"])), end
            tensor["data_offsets"] = [start, end]
    content = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + end)
    return entry(folder)


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
    _change(folder / "tokenizer_config.json", chat_template=template)


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


ENDLESS_CONTEXT = 8192
"""Context length in tokens. At one millisecond per token, an answer lasts longer than the rest of a test."""


def write_endless_llama(folder: Path, tokenizer_from: Path, *, seed: int, context: int) -> None:
    """Write a model as ``write_tiny_llama`` does, but without the token that ends a text."""
    write_tiny_llama(folder, tokenizer_from, seed=seed, context=context)
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    _change(folder / "config.json", eos_token_id=[vocabulary])
    _change(folder / "tokenizer_config.json", eos_token=None)


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


TEXT = """
    the a cat dog bird sits runs sleeps on under mat tree house river and or very big small red green query: passage:
    what is where who paris berlin capital of france germany yes no
"""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAIR_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} [SEP] {% endfor %}{% if add_generation_prompt %}"
    "answer: {% endif %}"
)
TINY_POSITIONS = 64


def entry(folder: Path) -> ModelEntry:
    """Return the entry of a model folder, as the catalog would."""
    return ModelEntry(**vars(read_folder(folder)), id=folder.name, path=folder, source="path")


def tiny_tokenizer(*, special: tuple[str, ...] = SPECIAL, frame: bool = True) -> Tokenizer:
    """Return a tokenizer of lower-case words and single characters with a small vocabulary.

    Args:
        special: Five tokens: padding, unknown, first, last, mask.
        frame: Whether texts begin with the first token and end with the last one, and pairs have two segments.
    """
    characters = [*map(chr, range(33, 127)), *(f"##{chr(n)}" for n in range(33, 127))]
    vocabulary = {token: at for at, token in enumerate(dict.fromkeys([*special, *TEXT.split(), *characters]))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=special[1], max_input_chars_per_word=20))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    if frame:
        first, last = special[2], special[3]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}",
            pair=f"{first} $A {last} $B:1 {last}:1",
            special_tokens=[(first, vocabulary[first]), (last, vocabulary[last])],
        )
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None = None, **config: Any) -> Tokenizer:
    tokenizer = tokenizer or tiny_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    written = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": TINY_POSITIONS, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return tokenizer


def write_json(folder: Path, files: Mapping[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def modules(*names: str) -> list[dict[str, Any]]:
    """Return the ``modules.json`` of a transformer followed by the given modules, such as ``Pooling``."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for at, name in enumerate(names, 1):
        kind = f"sentence_transformers.models.{name}"
        listed.append({"idx": at, "name": str(at), "path": f"{at}_{name}", "type": kind})
    return listed


def pooling_files(mode: str = "mean", *, normalize: bool = True, **pooling: Any) -> dict[str, Any]:
    """Return the files of an embedding model with this pooling mode."""
    names = ["Pooling", "Normalize"] if normalize else ["Pooling"]
    return {
        "modules.json": modules(*names),
        "1_Pooling/config.json": {"word_embedding_dimension": 32, f"pooling_mode_{mode}": True, **pooling},
    }


def bert_weights(*, seed: int = 0, width: int = 32, inner: int = 48, words: int = 0, labels: int = 0) -> Tensors:
    """Return the weights of two layers; with ``labels`` also those of the pooler and the classifier."""
    random = np.random.default_rng(seed)

    def dense(name: str, outputs: int, inputs: int) -> Tensors:
        weight = random.normal(0, 0.3, (outputs, inputs)).astype(np.float32)
        return {f"{name}.weight": weight, f"{name}.bias": random.normal(0, 0.1, outputs).astype(np.float32)}

    def norm(name: str) -> Tensors:
        weight = 1 + random.normal(0, 0.1, width)
        return {f"{name}.weight": weight.astype(np.float32), f"{name}.bias": np.zeros(width, np.float32)}

    tensors: Tensors = {}
    for name, count in (("word", words), ("position", TINY_POSITIONS), ("token_type", 2)):
        tensors[f"embeddings.{name}_embeddings.weight"] = random.normal(0, 0.5, (count, width)).astype(np.float32)
    tensors |= norm("embeddings.LayerNorm")
    for layer in (f"encoder.layer.{at}" for at in range(2)):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            tensors |= dense(f"{layer}.attention.{part}", width, width)
        tensors |= norm(f"{layer}.attention.output.LayerNorm") | norm(f"{layer}.output.LayerNorm")
        tensors |= dense(f"{layer}.intermediate.dense", inner, width) | dense(f"{layer}.output.dense", width, inner)
    if labels:
        tensors = {f"bert.{name}": each for name, each in (tensors | dense("pooler.dense", width, width)).items()}
        tensors |= dense("classifier", labels, width)
    return tensors


def write_tiny_bert(
    folder: Path,
    files: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    labels: int = 0,
    change: Mapping[str, npt.NDArray[Any] | None] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    **config: Any,
) -> ModelEntry:
    """Write a BERT of 2 layers, width 32: an embedder, or with ``labels`` a classifier (with one label, a reranker).

    Args:
        files: More files, as JSON or text; by default mean pooling and normalization, or none for a classifier.
        change: Tensors that replace others; None removes a tensor.
        tokenizer: Values of ``tokenizer_config.json``.
        config: Values of ``config.json``.
    """
    words = write_tokenizer(folder, **(tokenizer or {})).get_vocab_size()
    written = {
        "architectures": ["BertForSequenceClassification" if labels else "BertModel"],
        "model_type": "bert",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": TINY_POSITIONS,
        "type_vocab_size": 2,
        "vocab_size": words,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }
    if files is None:
        files = {} if labels else pooling_files("mean_tokens")
    tensors = bert_weights(seed=seed, words=words, labels=labels)
    return _write_encoder(folder, tensors | dict(change or {}), written | config, files)


def _write_encoder(
    folder: Path, tensors: Mapping[str, npt.NDArray[Any] | None], config: Mapping[str, Any], files: Mapping[str, Any]
) -> ModelEntry:
    save_file({name: each for name, each in tensors.items() if each is not None}, folder / "model.safetensors")
    write_json(folder, {"config.json": config, **files})
    return entry(folder)


def write_tiny_qwen3(
    folder: Path,
    files: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    prefix: str = "model.",
    change: Mapping[str, npt.NDArray[Any] | None] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    **config: Any,
) -> ModelEntry:
    """Write a Qwen3 of 2 layers, width 32: an embedder that pools the last token, unless the files define otherwise."""
    words = write_tokenizer(folder, **(tokenizer or {})).get_vocab_size()
    sizes = {"width": 32, "inner": 48, "heads": 4, "kv_heads": 2, "head_size": 8}
    weights = decoder_weights(seed=seed, words=words, qk_norm=True, **sizes)
    tensors = {f"{prefix}{name}": each for name, each in weights.items()}
    written = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "head_dim": 8,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TINY_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "vocab_size": words,
    }
    files = pooling_files("lasttoken") if files is None else files
    return _write_encoder(folder, tensors | dict(change or {}), written | config, files)


def logit_score_files(**prompt: Any) -> dict[str, Any]:
    """Return the files of a reranker by yes and no, as written by sentence-transformers 5.4 and later."""
    vocabulary = tiny_tokenizer().get_vocab()
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    transformer = modules()[0] | {"type": "sentence_transformers.base.modules.transformer.Transformer"}
    message = {"method": "forward", "method_output_name": "logits", "format": "flat"}
    return {
        "modules.json": [transformer, {"idx": 1, "name": "1", "path": "1_LogitScore", "type": kind}],
        "1_LogitScore/config.json": {"true_token_id": vocabulary["yes"], "false_token_id": vocabulary["no"]},
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {"message": message},
            "module_output_name": "causal_logits",
        },
        "config_sentence_transformers.json": {"model_type": "CrossEncoder", **prompt},
        "chat_template.jinja": PAIR_TEMPLATE,
    }


def write_tiny_qwen3_reranker(folder: Path, *, seed: int = 0, **config: Any) -> ModelEntry:
    """Write a decoder that ranks by the logits of yes and no, prompted with its chat template."""
    return write_tiny_qwen3(folder, logit_score_files(), seed=seed, **config)


def run(layers: Generator[Any, None, Vectors]) -> Vectors:
    """Run a generator of layers and return its result."""
    while True:
        try:
            next(layers)
        except StopIteration as end:
            result: Vectors = end.value
            return result


def load(listed: ModelEntry, **settings: Any) -> LoadedEncoder:
    from lmx_lab.engine.encoders.loading import load_encoder

    return load_encoder(listed, **{"limit_bytes": 2**40} | settings)


def texts_of(model: LoadedEncoder, inputs: Sequence[str | Sequence[int]], **options: Any) -> list[TextTokens]:
    """Return the tokens of texts."""
    return shared_pool().portal.run(model.texts.texts(inputs, **options))


def pairs_of(model: LoadedEncoder, query: str, documents: Sequence[str], **options: Any) -> list[TextTokens]:
    """Return the tokens of a query with each document."""
    return shared_pool().portal.run(model.texts.pairs(query, documents, **options))


def embed(model: LoadedEncoder, *inputs: str | tuple[int, ...], **options: Any) -> Vectors:
    """Return the vectors of texts, computed in one batch."""
    options = {"input_type": None, "truncate": False} | options
    return run(model.forward(texts_of(model, inputs, **options)))


MODEL_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}


def build_model(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a model of an architecture with random weights, whose activations are neither tiny nor huge."""
    import mlx.core as mx
    from mlx.utils import tree_map

    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": kind, **MODEL_SIZES, **changes}))
    model.update(tree_map(lambda value: value + 0.1 * mx.random.normal(value.shape), model.parameters()))
    mx.eval(model.parameters())
    return model


SMALL = {**MODEL_SIZES, "vocab_size": 49_152, "num_hidden_layers": 4, "max_position_embeddings": 32_768}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []}
MLX_FAMILIES: Mapping[str, dict[str, Any]] = {
    "all-heads": {"model_type": "llama", "num_key_value_heads": 4},
    "grouped-queries": {"model_type": "qwen3"},
    "one-head": {"model_type": "llama", "num_key_value_heads": 1},
    "experts": {"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True, **EXPERTS},
    "every-second-window": {
        **{"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 2},
        "query_pre_attn_scalar": 8,
    },
    "windows-and-experts": {
        **{"model_type": "gpt_oss", "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "recurrent": {
        **{"model_type": "mamba2", "num_heads": 4, "head_dim": 16, "state_size": 64, "conv_kernel": 4, "n_groups": 1},
        **{"use_bias": False, "use_conv_bias": True, "time_step_limit": [0.0, 1.0], "time_step_rank": 4},
        **{"layer_norm_epsilon": 1e-5, "expand": 2},
    },
    "convolutions": {
        **{"model_type": "lfm2", "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 32},
        **{"block_ff_dim": 64, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "full_attn_idxs": [1, 3]},
        "block_auto_adjust_ff_dim": False,
    },
    "latent-attention": {
        **{"model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8},
        **{"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_shared_experts": 1},
        "rope_scaling": None,
    },
    "gated-deltas": {
        **{"model_type": "qwen3_next", "num_experts": 4, "norm_topk_prob": True, **EXPERTS},
        **{"shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
        **{"full_attention_interval": 2, "partial_rotary_factor": 0.5},
    },
}
"""Configurations of models with each kind of KV cache, in addition to ``SMALL``."""


def write_mlx_model(folder: Path, config: Mapping[str, Any], tokenizer_from: Path) -> None:
    """Write a model of an architecture of mlx-lm with random weights and SmolLM2's tokenizer."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    mx.random.seed(0)
    model_class, args_class = _get_classes(dict(config))
    model: Any = model_class(args_class.from_dict(dict(config)))
    flat: Any = tree_flatten(model.parameters())
    weights = {name: mx.random.normal(value.shape) * 0.2 for name, value in flat}
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [2]}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}


def safetensors_bytes(dtype: str = "F16", count: int = 4) -> bytes:
    header = json.dumps({"w": {"dtype": dtype, "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(2 * count)
