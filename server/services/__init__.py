"""The servicers of `deltaflash.v1`."""
