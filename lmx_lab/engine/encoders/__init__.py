"""Models that read texts instead of writing them: embedders and rerankers, encoders as well as decoders."""

from lmx_lab.engine.encoders.loading import LoadedEncoder, load_encoder
from lmx_lab.engine.encoders.tokenizer import TextTokenizer, TextTokens

__all__ = ["LoadedEncoder", "TextTokenizer", "TextTokens", "load_encoder"]
