"""The nano model: a small page reader of the Qwen3.5 family, its data and its training."""
