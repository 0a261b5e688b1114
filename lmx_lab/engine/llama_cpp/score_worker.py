"""Score texts in a separate process: ``python -m lmx_lab.engine.llama_cpp.score_worker``.

Arguments: the private folder of the process, and the id of the parent process, with which this process ends. The first
line of standard input is a JSON object with ``fields`` (``model.path``, ``tokens``, ``threads``, ``step_tokens`` and
``cache_types``, see ``Model``) and ``data_bytes``, the memory limit. Each further line is a text: its ``tokens``,
``start``, the position of the first one to score, ``top``, the number of alternatives, and ``fresh``, whether the
beginning of the previous text must not be used. Each line of standard output is a JSON object: first ``ready``, then
for each text ``scores`` of some tokens and ``done``, the number of tokens that have been computed, until all are
scored. A score is a list: the log-probability of the token, its rank, the entropy, and the alternatives with their
log-probabilities. The process ends when standard input is closed.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmx_lab.engine.llama_cpp.native import Ggml, Model
from lmx_lab.engine.llama_cpp.worker import exit_with, exit_with_parent
from lmx_lab.errors import UnusableModelError

BATCH_TOKENS = 128
"""Number of tokens that are computed together. Their logits take 4 bytes for each token of the vocabulary."""


class Scorer:
    """Scores one text at a time, and remembers its tokens."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tokens: list[int] = []
        """The tokens in the context."""

    def score(self, tokens: list[int], start: int, top: int, *, fresh: bool) -> Iterator[dict[str, Any]]:
        """Yield the lines for a text.

        Raises:
            UnusableModelError: llama.cpp cannot compute a token, or the results are not finite.
        """
        # The logits of a token belong to the next one.
        first, end = max(1, start) - 1, len(tokens) - 1
        same = (at for at, (old, new) in enumerate(zip(self._tokens, tokens, strict=False)) if old != new)
        shared = 0 if fresh else next(same, min(len(self._tokens), len(tokens)))
        at = self._model.forget(min(shared, first, end))
        while at < end:
            batch = tokens[at : min(at + BATCH_TOKENS, end if at >= first else first)]
            # Until it is complete, the state of the context is not known.
            self._tokens = []
            self._model.compute(batch, at, outputs=at >= first)
            scored = range(at, at + len(batch)) if at >= first else range(0)
            scores = [_score(self._model.logits(each - at), tokens[each + 1], top) for each in scored]
            at += len(batch)
            self._tokens = tokens[:at]
            yield {"done": at + 1, "scores": scores}


def _score(logits: Any, token: int, top: int) -> Sequence[Any]:
    values = logits.astype(np.float64)
    values -= values.max()
    weights = np.exp(values)
    total = float(weights.sum())
    values -= math.log(total)
    found = float(values[token])
    if not math.isfinite(found):
        raise UnusableModelError("the model computes values that are not finite")
    # A probability of 0 adds nothing, but 0 times its logarithm is not a number.
    entropy = -float(np.dot(weights, np.where(weights > 0, values, 0.0))) / total
    most_likely = np.argpartition(-values, min(top, len(values) - 1))[:top].tolist() if top else []
    most_likely.sort(key=lambda each: (-values[each], each))
    return found, 1 + int((values > found).sum()), entropy, [(each, float(values[each])) for each in most_likely]


def main() -> None:
    """Score texts until the input or the parent process ends."""
    folder, parent = sys.argv[1], int(sys.argv[2])
    threading.Thread(target=exit_with_parent, args=(parent, folder), daemon=True).start()
    parameters = json.loads(sys.stdin.readline())
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (parameters["data_bytes"],) * 2)
    path, threads = Path((fields := parameters["fields"]).pop("model.path")), fields.pop("threads")
    try:
        fields["cache_types"] = tuple(fields["cache_types"])
        scorer = Scorer(Model(Ggml(), path, threads, **fields))
        _print({"ready": True})
        for line in sys.stdin:
            for answer in scorer.score(**json.loads(line)):
                _print(answer)
    except UnusableModelError as exc:
        print(f"error: {exc.message}", file=sys.stderr, flush=True)
        exit_with(folder, 1)
    exit_with(folder, 0)


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
