"""The executor of DeltaFlash: loads an engine directory and generates tokens with it."""
