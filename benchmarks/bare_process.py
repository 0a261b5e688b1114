"""Child process: mlx-lm's ``BatchGenerator`` alone. Replies to a line with prompts with the times of tokens."""

from __future__ import annotations

import time

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import BatchGenerator

from benchmarks.processes import Reply, child_settings, serve_lines, take_channel
from lmx_lab.engine.cpu_blas import configure_blas
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.weights import fit_weights


def main() -> None:
    channel = take_channel()
    # The same BLAS, functions and weights as in the engine.
    configure_blas()
    if mx.default_device() == mx.cpu:
        mx.disable_compile()
    model, tokenizer = load(child_settings()["model"])[:2]
    fit_weights(model, "auto", limit_bytes=memory.limit_bytes(None))

    def run(question: Reply) -> Reply:
        prompts = [
            [int(token) for token in tokenizer.apply_chat_template(messages, add_generation_prompt=True)]
            for messages in question["prompts"]
        ]
        batch = BatchGenerator(model, completion_batch_size=len(prompts), prefill_batch_size=len(prompts))
        uids = batch.insert(prompts, max_tokens=[question["max_tokens"]] * len(prompts))
        times: dict[int, list[float]] = {uid: [] for uid in uids}
        running = set(uids)
        while running:
            _, tokens = batch.next()
            now = time.perf_counter()
            for token in tokens:
                times[token.uid].append(now)
                if token.finish_reason is not None:
                    running.discard(token.uid)
        batch.close()
        return {"times": [times[uid] for uid in uids], "prompt_tokens": [len(prompt) for prompt in prompts]}

    serve_lines(channel, {}, run)


if __name__ == "__main__":
    main()
