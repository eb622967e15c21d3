"""A finished run as a model in MLflow: code and safetensors, with signature and example; nothing is pickled.

Logging one imports no torch: signature and example follow from the data's description, and what answers is put together
where the model is loaded (`pipelines/tracking/serving.py`).
"""

from __future__ import annotations

import importlib.metadata
import io
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flcore
from flcore.config.stored import PLUGIN_FOLDER
from flcore.core.errors import DataError
from flcore.experiment.run_folder import stored_config
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import read_json
from pipelines.tracking import description, loader

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature
    from mlflow.tracking.client import MlflowClient

MODEL_URI_TAG = "protofl.model_uri"

# What a logged model needs where it is served; the versions are those of this environment.
_REQUIREMENTS = ("mlflow", "numpy", "safetensors", "scikit-learn", "scipy", "torch", "torchvision")
_LOADER = "protofl_model"
_WHAT_IT_ANSWERS = "Class probabilities to images: uint8 [N, C, H, W], 0 to 255; client: whose own model answers."
_TAGS_OF_A_VERSION = ("method", "seed")  # the page gives each a line; hashes are tags of the run
_MAX_BYTES = 2**30
"""Of personal models together: those of thousands of clients stay in the run's folder."""
_NOT_WORTH_ASKING_BYTES = 8 * 2**20
"""So little of what clients remember is logged without asking the method whether it is needed, which imports torch."""


@dataclass(frozen=True)
class Prepared:
    """A model about to be logged: its files by their names there, and the description of the prepared data."""

    files: Mapping[str, Path]
    meta: Mapping[str, Any]


def prepare(run: RunFolder) -> Prepared:
    """Find what the model of a finished run is made from."""
    files, inputs = run.files, run.inputs
    meta = read_json(inputs.prepared / "meta.json")
    sources = {
        "config.json": files.config,
        "meta.json": inputs.prepared / "meta.json",
        "partition": inputs.partition,
        "server.safetensors": files.server,
    }
    missing = [path for path in sources.values() if not path.exists()]
    if missing:
        raise DataError(f"{missing[0]}: not there, so there is no model to log; run the same command again")
    if (run.directory / PLUGIN_FOLDER).is_dir():
        sources[PLUGIN_FOLDER] = run.directory / PLUGIN_FOLDER
    memories = sum(path.stat().st_size for path in files.clients.glob("*.safetensors"))
    if memories > _NOT_WORTH_ASKING_BYTES:
        from pipelines.tracking.serving import reads_memories

        if not reads_memories(stored_config(run.directory), meta, inputs.partition):
            memories = 0
    if memories:
        sources["clients"] = files.clients
    size = files.server.stat().st_size + memories
    if size > _MAX_BYTES:
        raise DataError(
            f"{run.directory}: its models take {size / 2**30:.1f} GiB together, too much for a tracking store"
        )
    return Prepared(sources, meta)


def log(client: MlflowClient, run: RunFolder, made: Prepared, experiment_id: str, run_id: str) -> str:
    """Log a model below an MLflow run; returns its URI."""
    # The client's calls and not `mlflow.pyfunc.log_model`, which works on process-wide state (active run, store).
    import mlflow.pyfunc
    import numpy as np
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    model = client.create_logged_model(
        experiment_id, name=description.run_name(run), source_run_id=run_id, model_type=run.config["model"]["name"]
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        mlflow.pyfunc.save_model(
            path=str(folder),
            loader_module=_LOADER,
            data_path=str(_gathered(made, Path(scratch) / "run")),
            code_paths=[str(path) for path in _code(Path(scratch))],
            signature=_signature(made.meta),
            input_example=np.zeros((2, *made.meta["shape"]), dtype=np.uint8),
            # Given, because MLflow would otherwise load the model in a second process to find out.
            pip_requirements=[f"{name}=={_version(name)}" for name in _REQUIREMENTS],
            mlflow_model=Model(
                artifact_path=model.artifact_location, run_id=run_id, model_uuid=model.model_id, model_id=model.model_id
            ),
        )
        client.log_model_artifacts(model.model_id, str(folder))
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    client.set_tag(run_id, MODEL_URI_TAG, model.model_uri)
    return str(model.model_uri)


def register(client: MlflowClient, run: Run, model_uri: str, name: str) -> ModelVersion:
    """Make a logged model a version of a registered model, once; its tags say whose model it is."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description=_WHAT_IT_ANSWERS)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    known = client.search_model_versions(f"name = '{name}' and run_id = '{run.info.run_id}'")
    if known:
        return known[0]
    # The place of the files and not `models:/<id>`, which a SQLite registry would look up in the store that is the
    # default of the process.
    model = client.get_logged_model(model_uri.removeprefix("models:/"))
    return client.create_model_version(
        name,
        model.artifact_location,
        run.info.run_id,
        tags={tag: run.data.tags[tag] for tag in _TAGS_OF_A_VERSION if tag in run.data.tags},
        model_id=model.model_id,
    )


def _signature(meta: Mapping[str, Any]) -> ModelSignature:
    """Return the signature: images, class probabilities, and the client; null is :attr:`Predictor.default_client`."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import DataType, ParamSchema, ParamSpec, Schema, TensorSpec

    return ModelSignature(
        inputs=Schema([TensorSpec(np.dtype(np.uint8), (-1, *meta["shape"]))]),
        outputs=Schema([TensorSpec(np.dtype(np.float32), (-1, meta["num_classes"]))]),
        params=ParamSchema([ParamSpec("client", DataType.long, None)]),
    )


def _gathered(made: Prepared, folder: Path) -> Path:
    """Copy the model's files under their names into a folder."""
    folder.mkdir()
    for name, path in made.files.items():
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        else:
            shutil.copyfile(path, folder / name)
    return folder


def _code(folder: Path) -> list[Path]:
    """Return the files that MLflow imports: the loader, and the archive that it imports from."""
    entry, archive = folder / f"{_LOADER}.py", folder / loader.ARCHIVE
    shutil.copyfile(loader.__file__, entry)
    archive.write_bytes(_archive())
    return [entry, archive]


@cache
def _archive() -> bytes:
    """Return `flcore` and the predictor, zipped; the same bytes for the same sources."""
    library = Path(flcore.__file__).parent
    sources = {path.relative_to(library.parent).as_posix(): path for path in sorted(library.rglob("*.py"))}
    sources[f"{loader.SERVING}.py"] = Path(__file__).with_name("serving.py")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sources.items():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _version(package: str) -> str:
    """Return the installed version without its local part (``+cu130``), which only one index knows."""
    return importlib.metadata.version(package).partition("+")[0]
