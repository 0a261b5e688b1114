"""Find the token ids of an answer that llama.cpp has parsed itself. Belongs to the engine's loop.

For such an answer, llama.cpp sends neither token ids nor the generated text of its tool calls, but ``/slots`` contains
the text of the last answer in each slot. This text is tokenized. To compare the tokens with those in the slot's cache,
one more token is generated after them: llama.cpp reports how many tokens the cache contained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmx_lab.engine.llama_cpp.model import HostedModel


async def find_ids(
    hosted: HostedModel, prompt: Sequence[int], sampling: Mapping[str, Any], *, output_tokens: int, ended: bool
) -> tuple[int, ...]:
    """Return the tokens of an answer that has just ended; none if they cannot be found.

    Args:
        sampling: The sampling parameters of the request, with llama.cpp's names.
        output_tokens: Number of tokens of the answer.
        ended: Whether the last one is the token with which the model ended its answer, which has no text.
    """
    # The last token of an answer is sampled, but is not in the cache.
    length = len(prompt) + output_tokens - 1
    for slot in await hosted.connection.get("/slots"):
        if slot["is_processing"] or slot.get("n_prompt_tokens") != length:
            continue
        tokens = await hosted.tokenize(
            slot.get("generated", ""), at_most=output_tokens + 1, parse_special=True, add_special=False
        )
        if len(tokens) != output_tokens - ended:
            continue
        known = [*prompt, *tokens]
        body = {**sampling, "temperature": 0, "prompt": known, "n_predict": 1, "return_tokens": True}
        answer = await hosted.connection.post("/completion", body)
        # The last token is always computed again.
        if answer["timings"]["cache_n"] != len(known) - 1:
            continue
        if not ended:
            return tuple(tokens)
        ends = (await hosted.load_token_table()).eos_tokens
        return (*tokens, *(token for token in answer["tokens"] if token in ends))
    return ()
