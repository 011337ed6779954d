"""Does a calibrator belong to these data? What must agree is refused, what should agree is warned about."""

from __future__ import annotations

from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS
from segcal.checks.calibrated_before import calibrated_folder
from segcal.errors import MismatchError
from segcal.manifest import Manifest
from segcal.types import AppliedPooling


def check_compatible(info: CalibratorInfo, manifest: Manifest, pooling: AppliedPooling, *, force: bool) -> list[str]:
    """Compare what a calibrator was fitted on with the data it is about to be applied to.

    Args:
        info: of the calibrator.
        manifest: of the data.
        pooling: how the members will be pooled, or that each is calibrated before their probabilities are averaged.
        force: apply a shift-sensitive calibrator to the other kind of file, or a second one, all the same.

    Returns:
        Warnings: differences that do not make the result wrong, but less sure.

    Raises:
        MismatchError: names the field that differs and the way out.
    """
    _check_classes(info, manifest)
    warnings = _pooling_differences(info, manifest, pooling)
    if manifest.kind != info.kind and not info.translation_invariant:
        message = (
            f"kind differs: {info.method} was fitted on {info.kind} and is not translation-invariant, the files hold "
            f"{manifest.kind}. The offset of the logits, which it uses, is lost in probabilities. Use a "
            "translation-invariant method (ms_c, dc, cms_ap, …)"
        )
        if not force:
            raise MismatchError(f"{message}, or --force where the command has it.")
        warnings.append(f"{message}; applied because of --force.")
    calibrated = calibrated_folder(manifest)
    if calibrated is not None:
        message = f"{calibrated}: holds maps that segcal has calibrated; a second calibration makes them worse"
        if not force:
            raise MismatchError(f"{message}. Give the predictions of the network, or --force where the command has it.")
        warnings.append(f"{message}; done because of --force.")
    return warnings + _prediction_differences(info, manifest)


def _pooling_differences(info: CalibratorInfo, manifest: Manifest, pooling: AppliedPooling) -> list[str]:
    """Refuse another pooling than that of the fit; warn of another number of members."""
    if pooling == "members-probabilities":
        return _on_single_members(info)
    if pooling != info.pooling and not (manifest.n_members == 1 and _is_invariant_map(info)):
        raise MismatchError(
            f"pooling differs: the calibrator ({info.method}) was fitted on pooled {info.pooling}, asked for is "
            f"pooling of {pooling}. Pool by {info.pooling}, or fit a calibrator with --pooling {pooling}."
        )
    if info.n_members in (None, manifest.n_members):
        return []
    way_out = (
        "it describes single models: `--pooling members-probabilities` calibrates each member and averages then"
        if info.n_members == 1
        else "no matter if the file is the pooled ensemble itself"
    )
    return [
        f"number of members differs: fitted on {info.n_members}, applied to {manifest.n_members}; calibration may "
        f"not carry over ({way_out})"
    ]


def _is_invariant_map(info: CalibratorInfo) -> bool:
    """Of the map alone: a pipeline may be invariant only because its pooling has taken the shift away (METHODS 1)."""
    return info.regions or CALIBRATORS[info.method].translation_invariant


def _on_single_members(info: CalibratorInfo) -> list[str]:
    """What a calibrator has to be like to be applied to each member alone."""
    if info.n_members == 1:
        return []
    pooled = f"the pooled {info.pooling} of {info.n_members or 'an unknown number of'} members"
    if info.pooling == "probabilities":
        raise MismatchError(
            f"pooling differs: the calibrator ({info.method}) was fitted on {pooled}, which are less sure "
            "of themselves than a single member. members-probabilities needs one fitted on single models "
            "(`segcal nnunet collect`, `segcal nnunet export --out-of-fold`), or on pooled logits."
        )
    return [
        f"pooling differs: fitted on {pooled}, applied to each member alone; calibration may not carry over "
        "(members-probabilities is meant for calibrators of single models)"
    ]


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
