"""Read and replace values inside a model while it computes. Runs on the engine thread."""
