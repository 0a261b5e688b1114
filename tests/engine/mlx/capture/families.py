"""Find out which architectures of mlx-lm can be traced, with small random models of all that one configuration fits.

    .venv/bin/python -m tests.engine.mlx.capture.families

writes the table in ``docs/trace-families.md``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_flatten

from lmx_lab.engine.mlx.capture.points import HookPoints, find_parts, find_points
from lmx_lab.errors import LabError
from tests.support.models import MODEL_SIZES

PAGE = Path(__file__).parents[4] / "docs" / "trace-families.md"
BEGIN = "| family | residual stream | attention and MLP | patterns | heads | logit lens |\n|---|---|---|---|---|---|\n"
MAX_WEIGHTS = 5_000_000
"""Architectures with more weights are not tested, because the generic configuration does not set their sizes."""
GENERIC: dict[str, Any] = {
    **MODEL_SIZES,
    "num_hidden_layers": 4,
    "rotary_pct": 1.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "mlp_bias": False,
    "layer_norm_bias": False,
    "qkv_bias": False,
    "rope_scaling": None,
    "rope_traditional": False,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "state_size": 8,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 512,
    "n_ctx": 512,
    "n_inner": 64,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 4,
    "mlp_ratio": 2,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "layernorm_eps": 1e-5,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "dim": 32,
    "n_kv_heads": 2,
    "ffn_hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim": 32,
    "num_layers": 4,
    "num_kv_reuse_layers": 1,
    "post_norm": True,
    "qk_norm": True,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "use_mixed_mlp_moe": True,
    "use_cla": False,
    "cla_share_factor": 2,
    "rotary_emb_base": 10_000,
    "rotary_dim": 8,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_proj_bias": False,
    "ssm_state_size": 8,
    "n_groups": 1,
    "time_step_limit": (0.0, 1.0),
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "block_size": 512,
    "num_dense_layers": 1,
    "use_expert_bias": True,
    "dim_model_base": 32,
    "scale_depth": 1.0,
    "scale_emb": 1.0,
    "shared_intermediate_size": 32,
    "hidden_act": "relu2",
    "linear_allow_neg_eigval": False,
    "conv1d_width": 4,
    "logits_soft_cap": 30.0,
    "attention_window_size": 16,
    "num_attention_groups": 2,
    "is_moe_layer": [False, True, True, True],
    "hybrid_override_pattern": "M*-M",
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "intermediate_size_mlp": 64,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "kv_channels": 8,
    "model_max_length": 512,
    "num_experts_per_token": 2,
    "index_head_dim": 8,
    "index_n_heads": 4,
    "index_topk": 16,
    "moe_layer_freq": 1,
}
"""Values for the parameters of configurations. Each architecture takes those that it knows."""
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4 = {**SLIDING, "global_head_dim": 8, "num_kv_shared_layers": 0}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("afmoe", "exaone_moe"), SLIDING),
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
    },
    "deepseek_v2": {"rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512}},
    "exaone4": {"sliding_window_pattern": "LG"},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gemma3n": {
        **GEMMA4,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": GEMMA4,
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "hunyuan": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1.0}},
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "head_dim": 8,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        }
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4": {"num_experts_per_tok": 1},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "mellum": {
        **SLIDING,
        "rope_parameters": {kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in SLIDING["layer_types"]},
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 512}},
    "ministral3": {
        **SLIDING,
        "rope_parameters": {
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 512,
            "rope_type": "default",
        },
    },
    "mistral4": {
        "rope_parameters": {
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 512,
            "rope_type": "default",
        }
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 32,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4,
        "ffn_multipliers": [2.0] * 4,
    },
    "plamo": {"num_attention_heads": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"] * 2},
    "step3p5": {
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "partial_rotary_factors": [1.0] * 4,
        "moe_layers_enum": "1,2,3",
    },
}
"""Values for single architectures."""
NESTED = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "llama4": "llama4",
    "mistral3": "llama",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Architectures whose configuration has that of a language model, with its name."""


@dataclasses.dataclass(frozen=True)
class Support:
    """What can be read of the models of an architecture."""

    residual: str
    parts: str = "no"
    patterns: str = "no"
    heads: str = "no"
    lens: str = "no"

    @classmethod
    def of(cls, found: HookPoints) -> Support:
        blocks = len(found.parts.blocks)

        def share(end: str) -> str:
            count = sum(name.endswith(end) for name in found.sizes)
            return "yes" if count == blocks else "no" if not count else f"{count} of {blocks} blocks"

        heads = share(".hook_z")
        if heads != "no" and not any(name.endswith(".hook_z") for name in found.points):
            heads = "read only" if heads == "yes" else f"{heads}, read only"
        return cls(
            residual=share(".hook_resid_post"),
            parts=share(".hook_mlp_out"),
            patterns=share(".hook_pattern"),
            heads=heads,
            lens="yes" if found.has_tail else "no",
        )


def architectures() -> Iterator[str]:
    """Yield the names of all modules with a model."""
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        source = Path(mlx_lm.models.__path__[0]) / f"{module.name}.py"
        if source.exists() and re.search(r"^class Model\(", source.read_text(encoding="utf-8"), re.MULTILINE):
            yield module.name


def support_of(kind: str) -> Support | None:
    """Return what can be read of a small model; None if the generic configuration does not fit the architecture."""
    mx.random.seed(0)
    try:
        module = importlib.import_module(f"mlx_lm.models.{kind}")
        names = inspect.signature(module.ModelArgs).parameters
        values = {**GENERIC, **OWN.get(kind, {})}
        if (inner := NESTED.get(kind)) is not None:
            values["text_config"] = {**values, **OWN.get(inner, {}), "model_type": inner}
        fields = {name: value for name, value in values.items() if name in names}
        model = module.Model(module.ModelArgs.from_dict({**fields, "model_type": kind}))
        if sum(value.size for _, value in tree_flatten(model.parameters())) > MAX_WEIGHTS:
            return None
        mx.eval(model.parameters(), model(mx.array([[1, 2, 3]])))
    # One module ends the process if its package is not installed.
    except (Exception, SystemExit):
        return None
    try:
        return Support.of(find_points(find_parts(model, kind), kind))
    except LabError:
        return Support(residual="no")


def table() -> str:
    """Return the rows of the table."""
    rows = []
    for kind in architectures():
        if (support := support_of(kind)) is not None:
            rows.append(f"| `{kind}` | {' | '.join(dataclasses.astuple(support))} |\n")
    return "".join(rows)


def written(page: str, rows: str) -> str:
    """Return the page with these rows in its table."""
    start = page.index(BEGIN) + len(BEGIN)
    end = re.search(r"^(?!\|)", page[start:], re.MULTILINE)
    assert end is not None
    return page[:start] + rows + page[start + end.start() :]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
