"""segcal_predict.json: what a run of `segcal nnunet predict` used, and which cases it finished."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import segcal
from segcal.applying.record import OutputFile
from segcal.applying.stored import StorageType
from segcal.errors import FileFormatError
from segcal.io.atomic import write_text_atomic
from segcal.nnunet.model import TrainedModel, file_sha256, require_nnunet
from segcal.nnunet.predict_steps import PredictFormat, PredictJob
from segcal.types import AppliedPooling

RECORD_NAME = "segcal_predict.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PredictedEntry(_Part):
    """One case: finished with its files, or failed with the message.

    Attributes:
        n_differing: voxels where the map names another class than the segmentation (members-probabilities only).
    """

    status: Literal["done", "failed"]
    images_sha256: tuple[str, ...] = ()
    outputs: tuple[OutputFile, ...] = ()
    n_differing: int = 0
    error: str | None = None

    def stands_for(self, files: Sequence[Path], out: Path) -> bool:
        """Whether the case was finished from these images and its files are still there, whole."""
        return (
            self.status == "done"
            and all((out / one.file).is_file() and (out / one.file).stat().st_size == one.bytes for one in self.outputs)
            and self.images_sha256 == tuple(file_sha256(path) for path in files)
        )


class ModelEntry(_Part):
    """One model folder; its folds by name, with the hash of their checkpoints."""

    folder: str
    configuration: str
    checkpoint: str
    checkpoint_sha256: dict[str, str]
    prediction: dict[str, Any]


class PredictRecord(_Part):
    """The content of segcal_predict.json."""

    format: Literal[1] = 1
    command: Literal["nnunet predict"] = "nnunet predict"
    calibrator_sha256: str
    method: str
    pooling: AppliedPooling
    fitted_on: dict[str, Any]
    preserves: str | None
    maps: PredictFormat
    dtype: StorageType
    models: tuple[ModelEntry, ...]
    nnunetv2: str
    segcal: str
    cases: dict[str, PredictedEntry] = Field(default_factory=dict)

    def save(self, out: Path) -> None:
        """Replace the file in `out`; same content, same bytes, whatever the order in which cases were finished."""
        content = json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True)
        write_text_atomic(out / RECORD_NAME, content + "\n")

    def differences(self, other: PredictRecord) -> list[str]:
        """The fields in which two runs differ; their cases do not count."""
        one, two = self.model_dump(exclude={"cases"}), other.model_dump(exclude={"cases"})
        return [name for name in one if one[name] != two[name]]


def fresh_record(models: Sequence[TrainedModel], job: PredictJob) -> PredictRecord:
    """The record of a run that has not done anything yet."""
    info = job.fitted.info
    promised = None if job.pooling == "members-probabilities" else info.preserves
    return PredictRecord(
        calibrator_sha256=job.fitted.sha256,
        method=info.method,
        pooling=job.pooling,
        fitted_on={"pooling": info.pooling, "n_members": info.n_members},
        preserves=promised,
        maps=job.format,
        dtype=job.dtype,
        models=tuple(_model_entry(model) for model in models),
        nnunetv2=require_nnunet(),
        segcal=segcal.__version__,
    )


def load_record(out: Path) -> PredictRecord | None:
    """The record in a folder, None where there is none."""
    path = out / RECORD_NAME
    if not path.is_file():
        return None
    try:
        return PredictRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file as a whole"
        raise FileFormatError(
            f"{path}: not the record of a run that can be continued ({where}: {first['msg']}). Leave out "
            "--continue_prediction to predict everything again, or choose another folder with -o."
        ) from error


def _model_entry(model: TrainedModel) -> ModelEntry:
    return ModelEntry(
        folder=model.folder.resolve().name,
        configuration=model.configuration,
        checkpoint=model.checkpoint,
        checkpoint_sha256=dict(zip(map(str, model.folds), model.checkpoint_sha256, strict=True)),
        prediction=model.prediction.model_dump(mode="json"),
    )
