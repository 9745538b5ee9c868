"""The commands of `deltaflash`."""
