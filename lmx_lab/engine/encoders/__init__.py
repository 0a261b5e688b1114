"""Run embedding models and rerankers, both encoders and decoders."""

from lmx_lab.engine.encoders.loading import LoadedEncoder, encoder_bytes, load_encoder
from lmx_lab.engine.encoders.tokenizer import TextTokenizer

__all__ = ["LoadedEncoder", "TextTokenizer", "encoder_bytes", "load_encoder"]
