"""Find out which architectures of mlx-lm can be traced, with small random models of all that one configuration fits.

    .venv/bin/python -m tests.engine.mlx.capture.families

writes the table in ``docs/trace-families.md``.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_flatten

from lmx_lab.engine.mlx.capture.points import find_parts, find_points
from lmx_lab.errors import LabError
from tests.support.models import MODEL_SIZES

PAGE = Path(__file__).parents[4] / "docs" / "trace-families.md"
BEGIN = "| family | residual stream | attention and MLP | patterns | heads | logit lens |\n|---|---|---|---|---|---|\n"
MAX_WEIGHTS = 5_000_000
"""Architectures with more weights are not tested, because the generic configuration does not set their sizes."""
SHARED = [
    (
        4,
        "num_hidden_layers num_experts num_local_experts n_routed_experts conv_kernel time_step_rank n_head "
        "n_layer n_heads n_layers linear_num_value_heads linear_conv_kernel_dim num_heads num_layers "
        "moe_num_experts mamba_d_conv mamba_num_heads conv1d_width index_n_heads",
    ),
    (
        2,
        "sliding_window_pattern num_experts_per_tok mlp_ratio linear_num_key_heads full_attention_interval "
        "n_kv_heads num_kv_heads moe_topk cla_share_factor attn_layer_period expert_layer_period mamba_expand "
        "num_attention_groups interleave_moe_layer_step num_experts_per_token",
    ),
    (
        8,
        "qk_rope_head_dim qk_nope_head_dim v_head_dim state_size linear_key_head_dim linear_value_head_dim "
        "rotary_dim mamba_d_state mamba_head_dim ssm_state_size mamba_n_heads mamba_d_head "
        "hidden_size_per_layer_input kv_channels index_head_dim",
    ),
    (
        1,
        "n_shared_experts first_k_dense_replace decoder_sparse_step n_group topk_group num_kv_reuse_layers "
        "num_shared_experts num_shared_expert attn_layer_offset expert_layer_offset n_groups num_dense_layers "
        "mamba_n_groups moe_layer_freq",
    ),
    (
        False,
        "attention_bias mlp_bias layer_norm_bias qkv_bias rope_traditional use_bias use_qkv_bias use_cla "
        "mamba_proj_bias conv_bias block_auto_adjust_ff_dim linear_allow_neg_eigval",
    ),
    (
        1.0,
        "rotary_pct logit_scale logits_scaling embedding_multiplier residual_multiplier routed_scaling_factor "
        "block_ffn_dim_multiplier scale_depth scale_emb",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size n_embd d_model dim hidden_dim block_dim "
        "dim_model_base shared_intermediate_size",
    ),
    (
        True,
        "norm_topk_prob use_conv_bias post_norm qk_norm use_qk_norm use_mixed_mlp_moe use_expert_bias mamba_conv_bias",
    ),
    (
        16,
        "sliding_window kv_lora_rank q_lora_rank block_multiple_of attention_window_size attention_chunk_size "
        "index_topk",
    ),
    (512, "n_positions n_ctx block_size model_max_length"),
    (64, "n_inner ffn_hidden_size intermediate_size_mlp"),
    (1e-05, "layer_norm_epsilon norm_eps layernorm_eps"),
]
"""Values that several parameters of configurations have, with the names of the parameters."""
GENERIC = {
    **MODEL_SIZES,
    **{name: value for value, names in SHARED for name in names.split()},
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "attention_multiplier": 0.3,
    "mlp_only_layers": [],
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rotary_emb_base": 10000,
    "time_step_limit": (0.0, 1.0),
    "conv_L_cache": 3,
    "hidden_act": "relu2",
    "logits_soft_cap": 30.0,
    "is_moe_layer": [False, True, True, True],
    "hybrid_override_pattern": "M*-M",
    "vocab_size_per_layer_input": 97,
}
"""Values for the parameters of configurations. Each architecture takes those that it knows."""
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
CONVOLUTION = {"layer_types": ["conv", "full_attention"] * 2}
ROPE = {"rope_theta": 1e4, "rope_type": "default"}
MISTRAL = {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 512}}
GEMMA4 = {**SLIDING, "global_head_dim": 8, "num_kv_shared_layers": 0}
OWN = {
    **dict.fromkeys(("afmoe", "exaone_moe"), SLIDING),
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONVOLUTION),
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
    "glm_moe_dsa": {"rope_parameters": ROPE},
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
    "llama4": {"num_experts_per_tok": 1},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "mellum": {**SLIDING, "rope_parameters": dict.fromkeys(SLIDING["layer_types"], ROPE)},
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 512}},
    "ministral3": {**SLIDING, **MISTRAL},
    "mistral4": MISTRAL,
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
    def of(cls, found):
        blocks = len(found.parts.blocks)

        def share(end):
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


def architectures():
    """Yield the names of all modules with a model."""
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        source = Path(mlx_lm.models.__path__[0]) / f"{module.name}.py"
        if source.exists() and re.search(r"^class Model\(", source.read_text(encoding="utf-8"), re.MULTILINE):
            yield module.name


def support_of(kind):
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


def table():
    """Return the rows of the table."""
    rows = []
    for kind in architectures():
        if (support := support_of(kind)) is not None:
            rows.append(f"| `{kind}` | {' | '.join(dataclasses.astuple(support))} |\n")
    return "".join(rows)


def written(page, rows):
    """Return the page with these rows in its table."""
    start = page.index(BEGIN) + len(BEGIN)
    end = re.search(r"^(?!\|)", page[start:], re.MULTILINE)
    assert end is not None
    return page[:start] + rows + page[start + end.start() :]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
