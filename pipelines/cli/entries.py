"""Commands about registered entries and new files: ``list``, ``show``, ``schema``, ``new``, ``init`` and ``check``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from flcore.core.errors import RunError
from pipelines.cli.headlines import KINDS, SHOWN, Headline, headlines
from pipelines.cli.options import Assignments, Common, File, Json, Name, Out

_METHOD = Annotated[Literal["method"], Parameter(metavar="KIND")]


def list_(
    kind: Annotated[str, Parameter(metavar="KIND", choices=KINDS)],
    /,
    *,
    params: File | None = None,
    as_json: Json = False,
    common: Common = Common(),
) -> int:
    """List methods, datasets, partitioners, models, samplers, engines or analyses.

    Args:
        params: parameter file; its plug-ins are listed too (default: params.yaml, if it exists)
    """
    has_more = _load_plugins(params, common.plugins)  # also refuses missing ones
    if not as_json and not has_more:
        print("\n".join(entry.line for entry in headlines(kind)))
        return 0
    from pipelines.cli import registry

    described = registry.describe(kind)
    entries = [Headline(one["name"], one["summary"], one.get("citation", "")) for one in described]
    print(json.dumps(described, indent=2) if as_json else "\n".join(entry.line for entry in entries))
    return 0


def show(
    kind: Annotated[str, Parameter(metavar="KIND", choices=tuple(SHOWN))],
    name: Annotated[str, Parameter(metavar="NAME")],
    /,
    *,
    params: File | None = None,
    as_json: Json = False,
    common: Common = Common(),
) -> int:
    """Show one entry with its parameters; of a method also switches, stages and search space.

    Args:
        name: see 'protofl list'
        params: parameter file; its plug-ins can be shown too (default: params.yaml, if it exists)
    """
    from pipelines.cli import registry

    _load_plugins(params, common.plugins)
    described = registry.describe_one(kind, name)
    print(json.dumps(described, indent=2) if as_json else "\n".join(registry.lines(described)))
    return 0


def _load_plugins(params: Path | None, plugins: Sequence[Path]) -> bool:
    """Load the plug-ins of the parameter file and the command line; return whether there are any."""
    from pipelines.plan.files import read_params, with_plugins

    entries = with_plugins(read_params(params), plugins).get("plugins")
    if not entries:
        return False
    from flcore.config.plugins import load_all

    return bool(load_all(entries))


def schema(*, common: Common = Common()) -> int:
    """Print the JSON Schema of parameter files, for editors; includes --plugin.

    First line of a parameter file that uses it:  # yaml-language-server: $schema=params.schema.json
    """
    from pipelines.plan import schema as schemas

    print(schemas.text(), end="")
    return 0


def new(kind: _METHOD, name: Name, /, *, out: Out = Path(), common: Common = Common()) -> int:
    """Create your own method and its test, outside the package.

    Args:
        kind: method
        name: name of the method: a-z, 0-9 and _, a letter first
        out: folder of the two files; {date} becomes today's date (UTC)
    """
    from pipelines.cli.new_method import write

    method, test = write(name, out)
    print(f"{method}: the method; run it with  protofl run --plugin {method} --method {name}")
    print(f"{test}: its test; run it with  python -m pytest {test}")
    return 0


def init(
    folder: Annotated[Path, Parameter(metavar="DIR")],
    /,
    *,
    images: Annotated[Path, Parameter(metavar="DIR")],
    title: Annotated[str | None, Parameter(metavar="TEXT")] = None,
    common: Common = Common(),
) -> int:
    """Create a project in which `dvc repro` compares methods on your own images.

    Writes params.yaml, dvc.yaml and infra/prefect.yaml (schedules), and makes a git repository with DVC. The images
    stay where they are. Without train and test folders, a fifth of each class is held out.

    Args:
        folder: new folder, or one without params.yaml and dvc.yaml
        images: folder or zip with a folder per class, or with train/ and test/ of them
        title: name of the data on pages and in MLflow (default: the name of the images' folder)
    """
    from pipelines.cli.new_project import create

    print("\n".join(create(folder, images, title)))
    print(f"created {folder / 'params.yaml'} and {folder / 'dvc.yaml'}; next:")
    print(f"  cd {shlex.quote(str(folder))}")
    print("  protofl compare --set federation.rounds=2 --seeds 0 --out runs/check   # a trial")
    print("  dvc repro                                                              # the comparison of params.yaml")
    return 0


def check(
    kind: _METHOD,
    name: Name,
    /,
    *,
    assignments: Assignments = (),
    slow: bool = False,
    as_json: Json = False,
    common: Common = Common(),
) -> int:
    """Check a method on synthetic data: repeatable, resumable, traffic counted.

    Exit code 0: all checks pass; 4: one fails.

    Args:
        kind: method
        name: a method (see 'protofl list methods'), or a file: mine.py
        assignments: set a parameter, e.g. method.mu=0.1; repeatable
        slow: also train in a worker process
    """
    from pipelines.cli.check_method import checked, lines

    outcomes = list(checked(name, assignments, slow=slow))
    print(json.dumps(outcomes, indent=2) if as_json else "\n".join(lines(outcomes)))
    failed = [f"{one['method']}: {one['check']}" for one in outcomes if one["result"] == "failed"]
    if failed:
        raise RunError(f"check method: failed: {', '.join(failed)}")
    return 0
