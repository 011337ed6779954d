"""Does a calibrator belong to these data? What must agree is refused, what should agree is warned about."""

from __future__ import annotations

from segcal.calibrator_info import CalibratorInfo
from segcal.errors import MismatchError
from segcal.manifest import Manifest
from segcal.types import Pooling


def check_compatible(info: CalibratorInfo, manifest: Manifest, pooling: Pooling, *, force: bool) -> list[str]:
    """Compare what a calibrator was fitted on with the data it is about to be applied to.

    Args:
        info: of the calibrator.
        manifest: of the data.
        pooling: how the members will be pooled.
        force: apply a shift-sensitive calibrator to the other kind of file all the same.

    Returns:
        Warnings: differences that do not make the result wrong, but less sure.

    Raises:
        MismatchError: names the field that differs and the way out.
    """
    _check_classes(info, manifest)
    if pooling != info.pooling and not (manifest.n_members == 1 and info.translation_invariant):
        raise MismatchError(
            f"pooling differs: the calibrator ({info.method}) was fitted on pooled {info.pooling}, asked for is "
            f"pooling of {pooling}. Pool by {info.pooling}, or fit a calibrator with --pooling {pooling}."
        )
    warnings = []
    if manifest.kind != info.kind and not info.translation_invariant:
        message = (
            f"kind differs: {info.method} was fitted on {info.kind} and is not translation-invariant, the files hold "
            f"{manifest.kind}. The offset of the logits, which it uses, is lost in probabilities. Use a "
            "translation-invariant method (ms_c, dc, cms_ap, …)"
        )
        if not force:
            raise MismatchError(f"{message}, or --force.")
        warnings.append(f"{message}; applied because of --force.")
    if info.n_members not in (None, manifest.n_members):
        warnings.append(
            f"number of members differs: fitted on {info.n_members}, applied to {manifest.n_members}; calibration may "
            "not carry over (no matter if the file is the pooled ensemble itself)"
        )
    return warnings + _prediction_differences(info, manifest)


def _check_classes(info: CalibratorInfo, manifest: Manifest) -> None:
    if info.regions != manifest.has_regions:
        fitted, given = ("regions", "classes") if info.regions else ("classes", "regions")
        raise MismatchError(
            f"the calibrator ({info.method}) was fitted for {fitted}, the manifest names {given}: "
            "a softmax and a sigmoid model cannot share a calibrator."
        )
    if len(info.classes) != manifest.n_classes:
        raise MismatchError(
            f"number of classes differs: the calibrator ({info.method}) was fitted for {len(info.classes)} "
            f"({', '.join(info.classes)}), the manifest names {manifest.n_classes} ({', '.join(manifest.class_names)})."
        )
    if info.classes != manifest.class_names:
        raise MismatchError(
            f"names of classes differ: the calibrator ({info.method}) was fitted for {', '.join(info.classes)}, the "
            f"manifest names {', '.join(manifest.class_names)}. If only the spelling changed, rename them there."
        )


def _prediction_differences(info: CalibratorInfo, manifest: Manifest) -> list[str]:
    here = {} if manifest.prediction is None else manifest.prediction.model_dump(mode="json", exclude_none=True)
    there = info.prediction or {}
    return [
        f"prediction.{key} differs: fitted with {there[key]}, applied with {here[key]}; calibration may not carry over"
        for key in sorted(set(here) & set(there))
        if here[key] != there[key]
    ]
