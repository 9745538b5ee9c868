"""What the tests of this room share."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_flushing() -> Iterator[None]:
    """Skips the wait for the disk: these tests end processes, not machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
