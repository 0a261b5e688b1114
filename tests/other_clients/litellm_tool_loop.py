"""Tool loops of LiteLLM's providers that cannot force a call, with scripted answers: ``make clients``.

They run in the environment of the clients, against the server at the address in the environment variable ``LAB``.
"""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import downloads a price list
import litellm

litellm.suppress_debug_info = True

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "population", "parameters": PARAMETERS}}
QUESTION = {"role": "user", "content": "How many people live in Paris?"}


def main() -> None:
    for provider, path in (("ollama_chat", ""), ("ollama", ""), ("cohere", "/v2/chat")):
        for stream in (False, True):
            base = f"{os.environ['LAB']}{path}"
            call = {"model": f"{provider}/default", "api_base": base, "tools": [TOOL], "stream": stream, "api_key": "x"}

            def answer(*messages, call=call):
                answered = litellm.completion(messages=list(messages), **call)
                return (litellm.stream_chunk_builder(list(answered)) if call["stream"] else answered).choices[0].message

            message = answer(QUESTION)
            (called,) = message.tool_calls
            result = {"role": "tool", "tool_call_id": called.id, "content": "2,100,000"}
            ended = answer(QUESTION, message, result)
            print(provider, stream, called.function.name, called.function.arguments, ended.content, ended.tool_calls)


if __name__ == "__main__":
    main()
