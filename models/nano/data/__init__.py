"""Page images with known Markdown text."""
