"""Errors for users: problem, place and remedy in one or two lines."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from importlib.util import find_spec


class Cure(StrEnum):
    """Advice for callers in Python; the command line has its own text for each."""

    START_OVER = "it cannot be resumed: pass restart=True, which throws it away and begins with the first round"
    TRAIN_AGAIN = "run it again with restart=True, which throws its results away, or delete its folder"
    TRAIN_FIRST = "train it first"
    OTHER_FOLDER = "choose another folder, or pass restart=True, which trains it again"
    PREPARE = "prepare the data there, or name another folder"
    PREPARE_AGAIN = "prepare the data again, or name another folder"
    DIVIDE = "divide the data there, or name another folder"
    DIVIDE_AGAIN = "divide the data again, or name another folder"
    NAME_PLUGIN = "add it to plugins"


MLOPS = "'protofl[mlops]'"
"""Requirement that installs Prefect, MLflow, DVC and Optuna."""


class ProtoflError(Exception):
    """Base of errors that are printed without a traceback."""


class ConfigError(ProtoflError):
    """An invalid configuration key, value or combination; raised before data are read."""


class DataError(ProtoflError):
    """Data that are missing, damaged, or cannot be divided as configured."""


class RunError(ProtoflError):
    """A run that started and failed; names the round, the client and the stage.

    Attributes:
        details: traceback of the cause; may be empty.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def listed(names: Iterable[object], most: int = 5) -> str:
    """Join names as ``a, b and c``; beyond ``most``, give the number of others."""
    shown = [str(name) for name in names]
    if len(shown) > most:
        shown[most - 1 :] = [f"{len(shown) - most + 1} others"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def require(module: str, key: str, install: str) -> None:
    """Refuse a configuration that needs a missing package; import nothing.

    Args:
        module: to be imported. key: configuration key with its value. install: argument of ``pip install``.

    Raises:
        ConfigError: names key and package.
    """
    if find_spec(module) is None:
        raise ConfigError(f"{key}: the package {module} is not installed; pip install {install}")


def require_accounting() -> None:
    """Refuse noise if the package that computes its privacy loss is missing.

    Raises:
        ConfigError: as :func:`require`.
    """
    require("dp_accounting", "noise for differential privacy", "dp-accounting")
