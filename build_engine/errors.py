"""What ends a run of build_engine; each type has its own exit code."""


class CheckpointError(Exception):
    """The checkpoint is damaged, incomplete or of a model that no engine can be made from."""


class OutputError(Exception):
    """The engine directory cannot be written: disk, permissions, lock or what stands there."""
