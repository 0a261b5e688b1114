"""The engine on MLX."""

import os

# Settings of MLX for NVIDIA GPUs, which it reads when it first uses one. It keeps a plan for each shape of its
# arguments, and by default may raise an error after too many shapes; prompts of a server have any number of them. It
# rounds float32 products to 10 bits by default; like on other devices, log-probabilities and vectors should be exact.
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
os.environ.setdefault("MLX_ENABLE_TF32", "0")
