"""Write ``tests/engine/encoders/minilm_reference.json``: vectors of MiniLM-L6-v2 computed with PyTorch.

    build/parity/bin/python tests/parity/make_minilm_reference.py FOLDER

FOLDER is the starter ``minilm-l6`` in the lab's store. Mean pooling and normalization are implemented here, as the
model's ``modules.json`` defines them.
"""

import hashlib
import json
import sys
from pathlib import Path

import tokenizers
import torch
import transformers

TARGET = Path(__file__).parents[1] / "engine" / "encoders" / "minilm_reference.json"
SCRIPT = "tests/parity/make_minilm_reference.py"
TEXTS = (
    "Hello world",
    "",
    "A man is eating food.",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Füße, naïve façade: 東京は日本の首都です。 Привет, мир! 🦊",
    "def add(a, b):\n\treturn a + b  # 1 + 1 == 2",
)


def main(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    vectors = []
    for text in TEXTS:
        inputs = tokenizer(text, truncation=True, max_length=256, padding=False, return_tensors="pt")
        with torch.no_grad():
            pooled = model(**inputs).last_hidden_state[0].mean(0)
        vectors.append([round(value, 7) for value in (pooled / pooled.norm()).tolist()])
    files = ("config.json", "model.safetensors", "tokenizer.json")
    origin = {
        "script": SCRIPT,
        "versions": {package.__name__: package.__version__ for package in (torch, transformers, tokenizers)},
        "sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files},
    }
    items = ",\n".join(
        json.dumps({"text": text, "vector": vector}, ensure_ascii=False)
        for text, vector in zip(TEXTS, vectors, strict=True)
    )
    TARGET.write_text(f'{{"origin": {json.dumps(origin, indent=1)},\n"items": [\n{items}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
