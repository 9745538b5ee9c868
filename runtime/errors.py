"""The exceptions of the runtime, which its native module registers, and how their lines read."""

from runtime._native import CapacityError, CudaError, EngineError, EngineLost

__all__ = ["CapacityError", "CudaError", "EngineError", "EngineLost", "refusal"]


def refusal(subject: object, found: str, needed: str, fix: str) -> str:
    """Composes the one line that refuses an input: what was found, what is needed, what fixes it.

    Args:
        subject: What is refused, most often a path.
        found: What is there.
        needed: What should be there.
        fix: The command that repairs it.

    Returns:
        One line; control characters of file names and file contents are escaped.
    """
    text = f"{subject}: found {found}; needed {needed}; fix: {fix}"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
