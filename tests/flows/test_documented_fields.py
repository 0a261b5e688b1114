"""No field that a client library documents is ignored silently: it has an effect, is named in a header, or is refused.

The value of each field is one that no field accepts. So a field with an effect is refused, and one without it is named.
"""

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.support.formats import FORMATS, Request

OPTIONS = (
    *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only"),
    *("use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep", "seed", "num_predict", "top_k", "top_p"),
    *("min_p", "tfs_z", "typical_p", "repeat_last_n", "temperature", "repeat_penalty", "presence_penalty"),
    *("frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline", "stop"),
)
OLLAMA = ("model", "stream", "think", "logprobs", "top_logprobs", "format", "options", "keep_alive")
# The lists of anthropic-python and ollama-python are written here, because these are not installed with the tests.
FIELDS = {
    "chat": chat_create_params.CompletionCreateParamsBase.__annotations__,
    "completions": completion_create_params.CompletionCreateParamsBase.__annotations__,
    "responses": response_create_params.ResponseCreateParamsBase.__annotations__,
    "messages": (
        *("max_tokens", "messages", "model", "cache_control", "container", "context_management", "inference_geo"),
        *("mcp_servers", "metadata", "output_config", "output_format", "service_tier", "speed", "stop_sequences"),
        *("stream", "system", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_p"),
    ),
    "ollama chat": (*OLLAMA, "messages", "tools"),
    "ollama generate": (*OLLAMA, "prompt", "suffix", "system", "template", "context", "raw", "images"),
}
NESTED = {
    "messages": [f"output_config.{name}" for name in ("effort", "format", "task_budget")],
    "responses": ["text.format", "text.verbosity", "reasoning.effort", "reasoning.summary", "reasoning.context"],
    "ollama chat": [f"options.{name}" for name in OPTIONS],
    "ollama generate": [f"options.{name}" for name in OPTIONS],
}
CASES = [(name, field) for fields in (FIELDS, NESTED) for name, names in fields.items() for field in names]


@pytest.mark.parametrize(("name", "field"), CASES)
def test_a_documented_field_is_not_ignored_silently(http, name, field):
    (form,) = [form for form in FORMATS if form.name == name]
    outer, _, inner = field.partition(".")
    # Any object is a schema.
    value = 5 if field == "format" else {"unknown_member": [{"of": "no field"}]}
    response = http.post(
        form.path, json=form.body(Request(extra={outer: {inner: value} if inner else value}), stream=False)
    )
    if response.status_code == 200:
        named = response.headers.get("x-lmx-ignored", "").split(", ")
        assert any(each == field or each.startswith(f"{field}.") for each in named), named
    else:
        assert response.status_code == 400
        assert outer in form.problem(response.json()).message
