"""The model that other tests keep busy, for the faults that need time to happen."""

from tests.engine.llama_cpp.conftest import long_gguf

__all__ = ["long_gguf"]
