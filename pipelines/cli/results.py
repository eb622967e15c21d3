"""Commands on finished runs: ``protofl track``, ``analyse``, ``archive``, ``reproduce`` and ``board``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter

from flcore.config.analyses import SUMMARIES
from flcore.core.errors import ConfigError, RunError, listed
from flcore.core.text import fit_to_print, shorten, unknown_key
from pipelines.addresses import without_password
from pipelines.cli.options import Assignments, Common, Folder, Name, Names, Out, Results
from pipelines.runs.standard_error import tell

_WITHOUT_ARCHIVE = Group("without an archive")
Uri = Annotated[
    str,
    Parameter(
        metavar="URI",
        help="tracking store (default: tracking.uri of params.yaml, else MLFLOW_TRACKING_URI, else "
        "sqlite:///mlruns/mlflow.db)",
    ),
]
_Zip = Annotated[Path, Parameter(metavar="X.zip")]


track = App(name="track", version_flags=())


@track.default
def track_runs(
    *directories: Annotated[Path, Parameter(metavar="DIR", required=True)],
    uri: Uri | None = None,
    common: Common = Common(),
) -> int:
    """Log runs to MLflow, for example after its server was away; or find the best run there.

    log what is missing         protofl track runs/mine runs/comparison runs/tune-fedprox
    the best finished run       protofl track best --metric mean_local --experiment digits/dirichlet
    and its model for serving   protofl track best --metric mean_local --promote

    Args:
        directories: folders of runs, comparisons, sweeps or studies
    """
    from pipelines.orchestration.pages import runs_page
    from pipelines.tracking.backfill import log_folder
    from pipelines.tuning.folder import StudyFiles
    from pipelines.tuning.log import StudyTracker, study_of

    store, section = _store(uri)
    for directory in directories:
        study = study_of(directory)
        if study is None:
            is_logged = log_folder(directory, store, register=section.get("register") is True)
        else:
            tracker = StudyTracker(study, uri=store)
            is_logged = tracker.finish() if StudyFiles(study).best.exists() else tracker.sync()
        if not is_logged:
            return 4
    tell(f"runs in MLflow: {runs_page(store)}")
    return 0


@track.command(version_flags=())
def best(
    *,
    metric: Name,
    experiment: Name | None = None,
    where: Annotated[str | None, Parameter(metavar="FILTER")] = None,
    promote: bool = False,
    uri: Uri | None = None,
    common: Common = Common(),
) -> int:
    """Print the best finished run in MLflow.

    Trials of studies are not ranked: they are scored on validation data.

    Args:
        metric: rank by a figure of metrics.json, or its name in MLflow
        experiment: DATASET/PARTITION (default: the only one with this metric)
        where: only runs that match this MLflow filter
        promote: register its model with the alias champion
    """
    from pipelines.tracking import best as ranking
    from pipelines.tracking.store import TrackingUnavailable

    store, _ = _store(uri)
    try:
        found = ranking.best(store, metric, experiment=experiment, where=where, promote=promote)
    except TrackingUnavailable as error:
        raise RunError(f"{without_password(store)}: does not answer ({error}); try again when it does") from error
    print(f"{found.name}: {found.words}\nrun: {found.run_id}")
    if found.model is not None:
        print(f"champion: {found.model}, or models:/{found.model.split('/')[1]}@{ranking.CHAMPION}")
    return 0


def _store(uri: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return the address of the tracking store, and the section ``tracking`` of ``params.yaml``."""
    from pipelines.plan.files import read_params
    from pipelines.tracking.store import is_possible, no_store, resolve_uri

    section = read_params(None).get("tracking")
    section = section if isinstance(section, Mapping) else {}
    store = resolve_uri(uri or section.get("uri"))
    if not is_possible(store):
        raise ConfigError(f"{no_store(store)}; name another with --uri, tracking.uri or MLFLOW_TRACKING_URI")
    return store, section


def analyse(
    directory: Annotated[Path, Parameter(metavar="RUN_DIR")],
    /,
    *,
    analyses: Names | None = None,
    prepared: Folder | None = None,
    partition: Folder | None = None,
    common: Common = Common(),
) -> int:
    """Analyse a finished run and rewrite its report.

    'protofl list analyses' says what each analysis shows.

    Args:
        directory: the run's folder
        analyses: which (default: evaluation.analyses of the run)
        prepared: prepared data (default: the run's)
        partition: partition (default: the run's)
    """
    from flcore.config.schema import Config
    from flcore.experiment.run_folder import stored_mapping
    from pipelines.reporting.run_report import report

    stored = stored_mapping(directory)
    chosen = stored["evaluation"].get("analyses") if analyses is None else analyses
    if not chosen:
        raise ConfigError(f"--analyses: name at least one of {', '.join(SUMMARIES)}")
    for name in analyses or ():
        if name not in SUMMARIES:
            raise ConfigError(unknown_key(f"--analyses {shorten(name)}", name, SUMMARIES).replace("key", "analysis", 1))
    config = Config.from_mapping({**stored, "evaluation": {**stored["evaluation"], "analyses": chosen}})
    print(report(directory, config=config, prepared=prepared, partition=partition))
    return 0


def archive(
    directory: Folder,
    /,
    *,
    out: Annotated[Out | None, Parameter(metavar="X.zip")] = None,
    licence: Annotated[str | None, Parameter(metavar="SPDX")] = None,
    common: Common = Common(),
) -> int:
    """Pack a finished run or comparison, without the data, into one file that others can verify.

    protofl archive runs/first --out first.zip     a run
    protofl archive runs/comparison                a comparison, with all its runs
    protofl archive artifacts                      the results of make run

    The same folder gives the same bytes. Of the data it has name, source, licence and fingerprint, names of classes and
    of files left out, and which sample is at which client; never an image.

    Args:
        directory: folder of a finished run or comparison; or artifacts
        out: archive to write (default: the folder's name, with .zip)
        licence: licence of the results, by its SPDX name (default: not stated)
    """
    from flcore.experiment.run_folder import refuse_inside_a_run
    from pipelines.proof.archive import archive as write

    target = out or Path(f"{directory.resolve().name}.zip")
    refuse_inside_a_run(target)
    # Default names may collide, so only a named file is replaced.
    digest, options = write(directory, target, licence=licence, replace=out is not None)
    print(
        f"{target}: {target.stat().st_size / 1e6:.1f} MB, SHA-256 {digest}\n"
        f"licence of the results: {licence or 'not stated (--licence)'}\n"
        f"repeat it with  protofl reproduce {target} --check{options}"
    )
    return 0


def reproduce(
    path: _Zip | None = None,
    /,
    *,
    assignments: Assignments = (),
    out: Out | None = None,
    check: bool = False,
    trust_plugins: bool = False,
    golden: Annotated[bool, Parameter(group=_WITHOUT_ARCHIVE)] = False,
    methods: Annotated[Names | None, Parameter(group=_WITHOUT_ARCHIVE)] = None,
    record: Annotated[bool, Parameter(group=_WITHOUT_ARCHIVE)] = False,
    common: Common = Common(),
) -> int:
    """Rerun an archive and verify that its results are the same bytes.

    protofl reproduce first.zip --check            exit code 0: all equal; 3: damaged archive; 4: a result differs
    protofl reproduce first.zip --check --set data.root=FOLDER     data that are not part of a package
    protofl reproduce --golden                     every method on digits, in about a minute

    Args:
        path: archive to reproduce
        assignments: set a value that changes no result, such as data.root=FOLDER or engine.workers=2
        out: folder of the results (default: runs/reproduced/<archive>)
        check: compare every result with the archive: by hash, or by tolerance on another class of processor
        trust_plugins: run code from the archive; read it first, it may do anything
        golden: run every method on digits and compare with the recorded hashes
        methods: with --golden: only these
        record: with --golden: record the new hashes
    """
    of_archives = {"--set": assignments, "--out": out, "--check": check, "--trust-plugins": trust_plugins}
    typed = [flag for flag, value in of_archives.items() if value]
    if golden and (path or typed):
        raise ConfigError(f"--golden: goes without {typed[0] if typed else 'an archive'}")
    if golden:
        return _golden(methods, record=record)
    if methods or record:
        raise ConfigError(f"{'--methods' if methods else '--record'}: goes with --golden")
    if path is None:
        raise ConfigError("reproduce: name an archive, or give --golden")
    from pipelines.plan.params import override
    from pipelines.proof.reproduce import report
    from pipelines.proof.reproduce import reproduce as run_again

    override({}, assignments)  # refuse contradictions before the archive is read
    findings = run_again(path, out, assignments, check=check, trust_plugins=trust_plugins)
    if findings is None:
        return 0
    print("\n".join(map(fit_to_print, report(path, findings))))
    if findings.other:
        raise RunError(f"{path}: {len(findings.other)} results are not what it says; they are named above")
    return 0


def _golden(methods: Names | None, *, record: bool) -> int:
    from pipelines.proof import golden

    if record:
        print(golden.record(methods))
        return 0
    outcome = golden.check(methods)
    print("\n".join(outcome.lines))
    if outcome.different:
        raise RunError(
            f"golden: {len(outcome.different)} of {outcome.checked} methods are not as recorded: "
            f"{listed(outcome.different)}\nwhere that is meant, protofl reproduce --golden --record keeps what came out"
        )
    return 0


def board(
    *places: Annotated[Path, Parameter(metavar="DIR", required=True)],
    out: Results = Path("runs/board"),
    common: Common = Common(),
) -> int:
    """Show archives on one page: accuracy, bytes, and the command that repeats each row.

    protofl board archives --out site     site/board.html

    Rows are compared only if they have the same data and the same configuration, except for seeds and method.

    Args:
        places: folders of archives, or archives
    """
    from pipelines.proof.board import board as write

    print(write(places, out))
    return 0
