"""The errors that users meet.

Each derives from `ValueError` and carries one line: what is wrong, with which values, and which
setting to change.
"""


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot run."""


class PlanError(ValueError):
    """A plan that is not right: the message names rank, hop and token ranges."""


class KernelError(ValueError):
    """A kernel that is not installed, or cannot do what the plan, dtype or head sizes need."""


def one_line(message: object) -> str:
    """The text of an error of other software in one line."""
    return " ".join(str(message).split())
