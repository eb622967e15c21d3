"""Checks for every method, in the package or outside: :func:`check_method`.

They train on 100 made-up images, on the CPU, in seconds. One client has a single sample, one a single class, one is
first sampled in a later round; one class has no samples.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flcore.core.errors import ProtoflError
from flcore.core.text import shorten
from flcore.engine.numerics import alone, single_thread
from flcore.methods.api import Method
from flcore.testing.checks import CHECKS, NotApplicableError
from flcore.testing.trial import Trial

__all__ = ["CHECKS", "CheckError", "CheckResult", "check_method"]


class CheckError(AssertionError):
    """A method does not pass a check; the message names method, check and finding in one line."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        check: its name.
        problem: in one line; None: it passes.
        reason: why it does not apply; None: it does.
    """

    check: str
    problem: str | None = None
    reason: str | None = None

    @property
    def meaning(self) -> str:
        """The guarantee of a method that passes."""
        return str(CHECKS[self.check].__doc__)


def check_method(
    cls: type[Method],
    settings: Mapping[str, Any] | None = None,
    /,
    *,
    skip: Collection[str] = (),
    slow: bool = False,
    stop: bool = True,
    **params: Any,
) -> list[CheckResult]:
    """Run all checks on a method; return their results.

    Args:
        cls: the method's class; it need not be registered.
        settings: sections of the configuration that it needs, such as ``{"model": {"name": "cnn"}}``.
        skip: names of checks that are left out.
        slow: also train in a worker process; only for registered methods.
        stop: raise the first problem; False returns it with the results of the other checks, none if ``runs`` fails.
        params: the method's own parameters.

    Raises:
        CheckError: the first check that fails.
        ConfigError: the parameters or settings cannot be used.
    """
    results = []
    with tempfile.TemporaryDirectory(prefix="protofl-check-") as place, alone():
        single_thread()
        trial = Trial(cls, settings or {}, params, Path(place))
        trial.config(trial.method())  # refuses invalid settings
        for name in CHECKS:
            left_out = name in skip or (name == "workers" and not slow)
            results.append(CheckResult(name, **({"reason": "left out"} if left_out else _run(name, trial))))
            if (problem := results[-1].problem) is not None:
                if stop:
                    raise CheckError(f"{cls.name}: {name}: {problem}")
                if name == "runs":
                    break
    return results


def _run(check: str, trial: Trial) -> dict[str, str | None]:
    try:
        return {"problem": CHECKS[check](trial)}
    except NotApplicableError as error:
        return {"reason": str(error)}
    except Exception as error:  # an error in the method is a finding
        text = str(error) if isinstance(error, ProtoflError) else f"{type(error).__name__}: {error}"
        return {"problem": shorten(" ".join(text.split()), 300)}
