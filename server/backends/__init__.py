"""Implementations of the backend protocol."""
