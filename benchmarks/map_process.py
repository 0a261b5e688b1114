"""Child process: answers rows with ``map`` of a lab that is attached to the server at ``url``, without an engine.

The reply to a line with ``texts`` and ``parameters`` contains the time and the CPU time that ``map`` took.
"""

from __future__ import annotations

import time
from typing import Any

import lmx_lab
from benchmarks.processes import Reply, child_settings, serve_lines, take_channel


def main() -> None:
    channel = take_channel()
    with lmx_lab.attach(child_settings()["url"]) as lab:

        def run(question: Reply) -> Reply:
            started, used = time.perf_counter(), time.process_time()
            answers: Any = lab.map(question["texts"], "{text}", schema=question.get("schema"), **question["parameters"])
            seconds, cpu_s = time.perf_counter() - started, time.process_time() - used
            return {
                "seconds": seconds,
                "cpu_s": cpu_s,
                "errors": int(answers["error"].notna().sum()),
                "first_error": str(next(iter(answers["error"].dropna()), "")),
                "output_tokens": int(answers["output_tokens"].sum()),
                "prompt_tokens": float(answers["prompt_tokens"].mean()),
                "cached_tokens": float(answers["cached_tokens"].mean()),
            }

        # pandas is imported by the first call.
        run({"texts": ["a warm-up"], "parameters": {"max_tokens": 1}})
        serve_lines(channel, {}, run)


if __name__ == "__main__":
    main()
