"""Models that ship with the project."""
