"""Define valid requests of every kind, from which the cases are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from soak.fuzzing.requests import ValidRequest

MODEL = "tiny"
"""Model that the requests name."""
HELLO = [{"role": "user", "content": "hello"}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 9},
        "kind": {"enum": ["a", "b", None, 3]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"part": {"anyOf": [{"type": "boolean"}, {"const": "x"}, {"type": "string", "pattern": "^[a-z]{2}$"}]}},
}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Where is it?"}, {"type": "text", "text": "Look!"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I have to look.",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"place": "sea"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
    {"role": "user", "content": "And now?", "name": "ann"},
]
SAMPLING = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"100": -100, "200": 5},
    "seed": 7,
}


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 4, **changes}


CHAT_BODIES: tuple[dict[str, Any], ...] = (
    chat(),
    chat(temperature=0, stop=["\n", "end"], user="me"),
    chat(**SAMPLING, n=2, logprobs=True, top_logprobs=3),
    chat(stream=True, stream_options={"include_usage": True}, max_completion_tokens=3),
    chat(messages=HISTORY, tools=[LOOK], tool_choice="auto", parallel_tool_calls=False),
    chat(messages=HISTORY, tools=[LOOK], tool_choice="required", stream=True),
    chat(tools=[LOOK], tool_choice={"type": "function", "function": {"name": "look"}}),
    chat(response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}),
    chat(response_format={"type": "json_object"}, ignore_eos=False),
    chat(response_format={"type": "regex", "pattern": "[a-c]{1,5}( x)?"}, stream=True),
    chat(response_format={"type": "grammar", "grammar": 'start: "a" | "b" start'}),
    chat(reasoning_effort="low", thinking_token_budget=2, chat_template_kwargs={"enable_thinking": True, "a": [1]}),
    chat(steer=[{"layer": 1, "vector": [0.5] * 32, "scale": -2.0}, {"layer": 0, "vector": [0] * 32}], stream=True),
    chat(metadata={"a": "b"}, store=False, service_tier="auto", prompt_cache_key="k", ignore_eos=True),
)
COMPLETION_BODIES: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "prompt": "Once upon", "max_tokens": 4},
    {"model": MODEL, "prompt": ["a", "b c"], "max_tokens": 2, "n": 2, "best_of": 2, **SAMPLING},
    {"model": MODEL, "prompt": [100, 200, 300], "max_tokens": 0, "echo": True, "logprobs": 2},
    {"model": MODEL, "prompt": [[5, 6], [7]], "max_tokens": 3, "stream": True, "stop": "x"},
)
OLLAMA_MESSAGES = [
    {"role": "user", "content": "hello", "images": []},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "seen", "tool_name": "look"},
]
OLLAMA_OPTIONS = {"num_predict": 4, "temperature": 0.5, "top_k": 3, "stop": ["x"], "seed": -1, "num_ctx": 64}
OLLAMA_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
OLLAMA_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat", {"model": MODEL, "messages": OLLAMA_MESSAGES, "options": OLLAMA_OPTIONS, "tools": OLLAMA_TOOLS}),
    ("chat", {"model": MODEL, "messages": OLLAMA_MESSAGES[:1], "format": SCHEMA, "options": {"num_predict": 8}}),
    ("chat", {"model": MODEL, "messages": [], "keep_alive": "5m"}),
    ("generate", {"model": MODEL, "prompt": "hello", "stream": False, "think": True, "options": OLLAMA_OPTIONS}),
    ("generate", {"model": MODEL, "prompt": "a", "raw": True, "logprobs": True, "options": OLLAMA_OPTIONS}),
    ("generate", {"model": MODEL, "prompt": "a", "suffix": "b", "options": OLLAMA_OPTIONS}),
    ("embed", {"model": "tiny-embedder", "input": ["a", "b"], "truncate": False, "dimensions": 8}),
    ("embeddings", {"model": "tiny-embedder", "prompt": "a"}),
    ("show", {"name": MODEL, "verbose": True}),
    ("pull", {"model": MODEL, "stream": False}),
)
TOKEN_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tokenize", {"content": "hello", "add_special": True, "with_pieces": True}),
    ("tokenize", {"model": MODEL, "messages": OLLAMA_MESSAGES[:1], "return_token_strs": True}),
    ("detokenize", {"tokens": [100, 200]}),
    ("apply-template", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
)
RESPONSES_TOOLS = [
    {"type": "function", "name": "look", "parameters": SCHEMA},
    {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}},
    {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "look"}]},
    {"type": "web_search"},
]
RESPONSES_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "look", "namespace": "files", "arguments": '{"a": 1}'},
    {"type": "custom_tool_call", "call_id": "d", "name": "edit", "input": "aa"},
    {"type": "function_call_output", "call_id": "c", "output": "seen"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "done"}]},
]
RESPONSES_BODIES: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "input": "hello", "max_output_tokens": 4, "instructions": "Be brief.", "metadata": {"a": "b"}},
    {"model": MODEL, "input": RESPONSES_ITEMS, "tools": RESPONSES_TOOLS, "max_output_tokens": 4, "stream": True},
    {
        "model": MODEL,
        "input": "hi",
        "tools": RESPONSES_TOOLS,
        "tool_choice": {"type": "custom", "name": "edit"},
        "store": False,
    },
    {
        "model": MODEL,
        "input": "hi",
        "max_output_tokens": 4,
        "text": {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
    {"model": MODEL, "input": "hi", "max_output_tokens": 4, "background": True},
    {"model": MODEL, "input": "hi", "previous_response_id": "resp_1", "parallel_tool_calls": False},
)
MESSAGES_TOOLS = [
    {"name": "look", "description": "Look somewhere.", "input_schema": SCHEMA},
    {"type": "web_search_20250305", "name": "web_search"},
]
MESSAGES_HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "Look!", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c", "name": "look", "input": {"name": "sea"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "seen"}]},
            {"type": "document", "source": {"type": "text", "data": "a text"}},
        ],
    },
]
MESSAGES_BODIES: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "messages": HELLO, "max_tokens": 4, "system": "Be brief.", "stop_sequences": ["x"], "top_k": 3},
    {
        "model": MODEL,
        "messages": MESSAGES_HISTORY,
        "max_tokens": 4,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "Be brief."}],
        "tools": MESSAGES_TOOLS,
        "stream": True,
    },
    {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 8,
        "tools": MESSAGES_TOOLS,
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    },
    {"messages": HELLO, "max_tokens": 4, "thinking": {"type": "disabled"}, "temperature": 0, "metadata": {"a": "b"}},
)
COUNT_BODIES: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "messages": MESSAGES_HISTORY, "tools": MESSAGES_TOOLS},
    {"messages": HELLO, "system": "Be brief."},
)
EMBEDDING_BODIES: tuple[dict[str, Any], ...] = (
    {"model": "default", "input": "a cat"},
    {"model": "tiny-embedder", "input": ["the cat sits", "a dog"], "encoding_format": "base64", "dimensions": 8},
    {"model": "default", "input": [5, 6, 7], "input_type": "query", "user": "me"},
    {"model": "default", "input": [[5, 6], [7, 8, 9]], "truncate": True, "encoding_format": "float"},
)
PAIR = ["a small dog", "a big cat in the house"]
RERANK_BODIES: tuple[dict[str, Any], ...] = (
    {"model": "default", "query": "a cat", "documents": PAIR},
    {
        "model": "tiny-reranker",
        "query": "where",
        "documents": [{"text": "berlin"}, "paris"],
        "top_n": 1,
        "truncate": True,
    },
    {"model": "default", "query": "who", "documents": PAIR * 3, "return_documents": False, "raw_scores": True},
    {"query": "a cat", "texts": PAIR, "return_text": True, "raw_scores": False},
)
CHAT = tuple(ValidRequest(method="POST", path="/v1/chat/completions", body=body) for body in CHAT_BODIES)
COMPLETIONS = (
    *(ValidRequest(method="POST", path="/v1/completions", body=body) for body in COMPLETION_BODIES),
    ValidRequest(method="POST", path="/completion", body={"prompt": "hello", "n_predict": 4, "n_probs": 2}),
    ValidRequest(method="POST", path="/infill", body={"input_prefix": "a", "input_suffix": "b", "n_predict": 4}),
)
OLLAMA = (
    *(ValidRequest(method="POST", path=f"/api/{name}", body=body) for name, body in OLLAMA_BODIES),
    *(
        ValidRequest(method="GET", path=f"/api/{name}")
        for name in ("tags", "ps", "version", "v0/models", "v0/models/tiny", "v1/models")
    ),
)
TOKENS = (
    *(ValidRequest(method="POST", path=f"/{name}", body=body) for name, body in TOKEN_BODIES),
    *(ValidRequest(method="GET", path=path) for path in ("/props", "/health", "/slots", "/tokenizer_info", "/version")),
)
RESPONSES = (
    *(ValidRequest(method="POST", path="/v1/responses", body=body) for body in RESPONSES_BODIES),
    ValidRequest(method="POST", path="/v1/responses/input_tokens", body=RESPONSES_BODIES[1]),
    ValidRequest(method="POST", path="/v1/responses/compact", body={"model": MODEL, "input": RESPONSES_ITEMS}),
    ValidRequest(method="GET", path="/v1/responses/resp_1"),
    ValidRequest(method="GET", path="/v1/responses/resp_1/input_items?limit=3&order=asc&after=msg_1"),
    ValidRequest(method="POST", path="/v1/responses/resp_1/cancel"),
    ValidRequest(method="DELETE", path="/v1/responses/resp_1"),
)
MESSAGES = (
    *(ValidRequest(method="POST", path="/v1/messages", body=body) for body in MESSAGES_BODIES),
    *(ValidRequest(method="POST", path="/v1/messages/count_tokens", body=body) for body in COUNT_BODIES),
    ValidRequest(
        method="POST",
        path="/v2/chat",
        body={
            "model": MODEL,
            "messages": [{"role": "user", "content": "Say hello."}],
            "response_format": {"type": "json_object", "json_schema": {"type": "object"}},
            "max_tokens": 8,
            "p": 0.9,
        },
    ),
)
EMBEDDINGS = (
    *(ValidRequest(method="POST", path="/v1/embeddings", body=body) for body in EMBEDDING_BODIES),
    ValidRequest(
        method="POST",
        path="/v2/embed",
        body={"model": "default", "texts": list(PAIR), "input_type": "search_query", "embedding_types": ["float"]},
    ),
    ValidRequest(method="POST", path="/embedding", body={"content": list(PAIR), "embd_normalize": -1}),
    ValidRequest(
        method="POST", path="/embed", body={"inputs": list(PAIR), "truncate": True, "normalize": False, "dimensions": 8}
    ),
)
SCORE_BODIES: tuple[dict[str, Any], ...] = (
    {"model": "default", "text_1": "a cat", "text_2": PAIR, "truncate_prompt_tokens": 8},
    {"queries": list(PAIR), "documents": list(PAIR), "use_activation": False},
)
RERANK = (
    *(
        ValidRequest(method="POST", path=path, body=body)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
        for body in RERANK_BODIES
    ),
    *(ValidRequest(method="POST", path=path, body=body) for path in ("/v1/score", "/score") for body in SCORE_BODIES),
)
LOAD, UNLOAD, TRACE = "/admin/models/load", "/admin/models/unload", "/admin/trace"
TRACES: tuple[dict[str, Any], ...] = (
    {"kind": "hooks"},
    {
        "kind": "activations",
        "input": {"text": "the sea is"},
        "hooks": ["blocks.*.hook_resid_post"],
        "positions": [0, -1],
    },
    {"kind": "logit_lens", "input": {"messages": [{"role": "user", "content": "hello"}]}, "top": 3},
    {
        **{"kind": "patching", "input": {"tokens": [1, 2, 3, 4]}, "clean": {"tokens": [1, 5, 3, 4]}},
        **{"answer": 6, "other": 7, "hooks": ["blocks.0.hook_resid_pre"], "positions": [1]},
    },
    {"kind": "attribution", "input": {"text": "the sea is"}, "token": 5, "other": 6},
)
ADMIN = (
    ValidRequest(method="POST", path=LOAD, body={"model": MODEL}),
    ValidRequest(method="POST", path=LOAD, body={"model": "tiny-two"}),
    ValidRequest(method="POST", path=LOAD, body={"model": "org/no-such-model"}),
    ValidRequest(method="POST", path=LOAD, body={"model": "/no/such/folder"}),
    ValidRequest(method="POST", path=LOAD, body={"model": "tiny-embedder"}),
    ValidRequest(method="POST", path=UNLOAD, body={"model": MODEL}),
    ValidRequest(method="POST", path=UNLOAD, body={}),
    ValidRequest(method="POST", path=UNLOAD),
    ValidRequest(method="POST", path="/admin/models/cancel", body={"model": MODEL}),
    ValidRequest(method="POST", path="/admin/requests/stop", body={"id": "req_0123456789abcdef"}),
    ValidRequest(method="POST", path="/admin/models/keep", body={"model": MODEL, "pin": False, "ttl_s": 600}),
    *(
        ValidRequest(method="GET", path=path)
        for path in (
            *("/admin/models", "/admin/requests", "/v1/models", "/v1/models/tiny", "/metrics", "/readyz"),
            "/admin/timeline?last_s=9.5&limit=3&before=7",
            f"/admin/models/plan?model={MODEL}&context_length=100",
        )
    ),
    *(ValidRequest(method="POST", path=TRACE, body={"model": MODEL, "trace": trace}) for trace in TRACES),
)

PAGES = tuple(ValidRequest(method="GET", path=path) for path in ("/healthz", "/", "/docs", "/openapi.json"))
SERVER_EVENTS = tuple(
    ValidRequest(method="GET", path=f"/admin/events{query}") for query in ("", "?include=samples", "?include=requests")
)
"""Requests for streams without an end."""

SESSIONS = tuple(f"fuzz-{number}" for number in range(3))
TURN = {"content": "hello", "overrides": {"max_tokens": 4, "temperature": 0, "seed": 1}}
SERVER = {"name": "nothing", "transport": "stdio", "command": "/no/such/program", "args": ["-x"], "env": {"A": "b"}}
HTTP_SERVER = {"name": "nowhere", "transport": "http", "url": "http://127.0.0.1:1/mcp", "headers": {"x": "y"}}
CREATED: tuple[dict[str, Any], ...] = (
    {},
    {"session_id": SESSIONS[0], "title": "a title", "metadata": {"a": [1, None, {"b": 2.5}]}},
    {
        "session_id": SESSIONS[1],
        "model": "default",
        "system_prompt": "Be brief.",
        "tools": ["look", "time__*"],
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": [{"call_id": "c", "name": "look", "arguments": "{}"}]},
            {"role": "tool", "content": "seen", "call_id": "c"},
        ],
    },
)
TURNS: tuple[dict[str, Any], ...] = (
    TURN,
    {"turn_id": "t-1", "content": "hello", "when_busy": "interrupt", "overrides": {"max_tokens": 2, "max_steps": 1}},
    {"content": "look", "when_busy": "reject", "overrides": {"max_tokens": 40, "tool_choice": "look", "timeout_s": 5}},
    {"content": "ask", "overrides": {"max_tokens": 40, "tool_choice": "change", "extra": {"stop": ["x"]}, "top_k": 5}},
)


def _daemon() -> list[ValidRequest]:
    in_session = [f"/v3/sessions/{session}" for session in SESSIONS]
    posts: list[tuple[str, tuple[Any, ...]]] = [
        ("/v3/sessions", CREATED),
        *((f"{path}/turns", TURNS) for path in in_session),
        *((f"{path}/fork", ({"title": "a fork"}, {"through_turn_id": "t-1"}, None)) for path in in_session[:1]),
        *((f"{path}/cancel", ({"queued": True}, {"turn_id": "t-1"}, None)) for path in in_session[:2]),
        (f"{in_session[0]}/turns/t-1/cancel", (None,)),
        ("/v3/permissions/per_0", ({"decision": "allow", "scope": "session"}, {"decision": "deny"})),
        ("/v3/mcp/servers", (SERVER, HTTP_SERVER)),
        ("/v3/mcp/test", (SERVER, HTTP_SERVER)),
        *((f"/v3/mcp/servers/nothing/{verb}", (None,)) for verb in ("test", "restart")),
    ]
    changes: dict[str, Any] = {"title": None, "archived": True, "metadata": {}, "tools": [], "revision": 1}
    patches: list[tuple[str, Any]] = [
        *((path, {**changes, "title": "other"}) for path in in_session),
        ("/v3/mcp/servers/nothing", {"args": ["-y"], "env": {"A": "***"}, "permission": "allow", "start_timeout_s": 1}),
    ]
    gets = [
        *("/v3/health", "/v3/daemon", "/v3/sessions?limit=5&archived=false&q=a", "/v3/permissions", "/v3/mcp/servers"),
        *(
            "/v3/events?after=0&limit=3&types=turn.*",
            "/v3/events?after=5",
            "/v3/openapi.json",
            "/v3/mcp/servers/nothing/tools",
        ),
        *in_session,
        *(f"{path}/events?after=0&limit=2" for path in in_session),
        f"{in_session[0]}/turns/t-1?wait=0.1",
    ]
    return [
        *(ValidRequest(method="POST", path=path, body=body) for path, bodies in posts for body in bodies),
        *(ValidRequest(method="PATCH", path=path, body=body) for path, body in patches),
        *(ValidRequest(method="GET", path=path) for path in gets),
        *(
            ValidRequest(method="DELETE", path=path)
            for path in (in_session[2], "/v3/mcp/servers/nothing", "/v3/mcp/servers/x")
        ),
    ]


def naming(model: str, value: Any) -> Any:
    """Return the body, or the part of it, with another model instead of ``MODEL``."""
    match value:
        case dict():
            return {key: naming(model, each) for key, each in value.items()}
        case list():
            return [naming(model, each) for each in value]
    return model if value == MODEL else value


def requests_naming(model: str, requests: Sequence[ValidRequest]) -> tuple[ValidRequest, ...]:
    return tuple(replace(request, body=naming(model, request.body)) for request in requests)


DAEMON = tuple(_daemon())
"""All routes of the daemon except ``/v3/daemon/shutdown``, which would stop it."""
