"""Find model files on this disk and fetch others. No module of this package loads a model."""
