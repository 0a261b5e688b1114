"""Download models from the Hugging Face hub and verify them."""
