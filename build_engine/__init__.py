"""Makes engine directories from Hugging Face checkpoints."""
