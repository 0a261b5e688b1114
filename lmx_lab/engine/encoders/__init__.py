"""Run embedding models and rerankers, both encoders and decoders."""
