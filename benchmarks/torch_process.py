"""Child process in the environment of ``make parity``: embeddings by transformers on torch, float32, CPU.

It must not import the lab, so that only torch is measured.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from transformers import AutoModel, AutoTokenizer


def main() -> None:
    # Standard output is reserved for replies; other output goes to the log.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    folder = json.loads(sys.argv[1])["model"]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    def embed(texts: list[str]) -> int:
        batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            pooled = (hidden * mask).sum(1) / mask.sum(1)
            torch.nn.functional.normalize(pooled, dim=-1)
        return int(batch["attention_mask"].sum())

    embed(["a warm-up"] * 64)
    channel.write(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__}) + "\n")
    for line in sys.stdin:
        started = time.perf_counter()
        tokens = embed(json.loads(line)["texts"])
        channel.write(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()
