"""Fixtures with a model of long context, for faults that need a long generation."""

from tests.engine.llama_cpp.conftest import long_gguf

__all__ = ["long_gguf"]
