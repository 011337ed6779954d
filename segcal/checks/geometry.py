"""Do the arrays of one case lie on one grid? Where shapes differ, an order of axes that would fit is named."""

from __future__ import annotations

from segcal.checks.findings import Finding, Severity
from segcal.checks.orientation import ORDERS, Orientation, Shape
from segcal.io.members import Member
from segcal.manifest import Manifest
from segcal.types import Grid


def member_findings(manifest: Manifest, member: Member, first: Member | None, *, case: str, file: str) -> list[Finding]:
    """Number of channels against the manifest; shape, crop and grid against the first member of the case."""
    found = []
    n_channels = member.values.shape[0]
    if n_channels != manifest.n_classes:
        last = member.values.shape[-1] == manifest.n_classes
        hint = " The last axis would fit: move the channels to the front." if last else ""
        text = (
            f"the array has {n_channels} channels, shape {member.values.shape} (class, z, y, x), but the manifest "
            f"names {manifest.n_classes}: {', '.join(manifest.class_names)}.{hint}"
        )
        found.append(Finding("channels", "fatal", case, file, text))
    if first is None:
        return found
    if member.values.shape[1:] != first.values.shape[1:]:
        text = f"the grid is {member.values.shape[1:]} (z, y, x), the first member's {first.values.shape[1:]}."
        found.append(Finding("member_shape", "fatal", case, file, f"{text} Members must show the same image."))
    elif member.crop != first.crop:
        text = (
            f"the crop is {member.crop}, the first member's {first.crop}; members must have been predicted in one box."
        )
        found.append(Finding("member_crop", "fatal", case, file, text))
    elif not _same_place(member.grid, first.grid):
        text = "the affine differs from the first member's; write all members in the image's geometry."
        found.append(Finding("member_affine", "fatal", case, file, text))
    return found


def partner_findings(
    member: Member, partner: Grid, *, role: str, severity: Severity, case: str, file: str, axes: str
) -> list[Finding]:
    """Grid of a label, image or deployed segmentation against the members."""
    shape = _space(member)
    if partner.shape != shape:
        hint = _order_hint(shape, partner.shape, axes)
        text = f"the {role} is {partner.shape} (z, y, x), the members are {shape}; {hint}"
        return [Finding(f"{role}_shape", severity, case, file, text)]
    if not _same_place(member.grid, partner):
        text = (
            f"the affine of the {role} differs from the members'; arrays are compared voxel by voxel, so write the "
            f"members in the geometry of the {role}."
        )
        return [Finding(f"{role}_affine", severity if role == "label" else "warning", case, file, text)]
    return []


def image_label_findings(image: Grid, label: Grid, *, case: str, file: str) -> list[Finding]:
    """Affine of the image against the label's, when both have the same shape."""
    if image.shape != label.shape or image.agrees_with(label):
        return []
    text = "the affines of image and label differ; check that the label was drawn on this image."
    return [Finding("image_affine", "warning", case, file, text)]


def _order_hint(shape: Shape, target: Shape, axes: str) -> str:
    if axes == "czyx" and shape[::-1] == target:
        return "the reverse order of axes would fit: set `axes: cxyz` if the arrays are (class, x, y, z)."
    if axes == "cxyz" and shape[::-1] == target:
        return "the reverse order of axes would fit: set `axes: czyx`, which is nnU-Net's."
    for order in ORDERS:
        if Orientation(order).shape(shape) == target:
            return f"it would fit with {Orientation(order).words()}: transpose the member arrays to (class, z, y, x)."
    return "no order of axes fits: this is another image, or the members were not resampled back to it."


def _space(member: Member) -> Shape:
    _, z, y, x = member.values.shape
    return z, y, x


def _same_place(one: Grid | None, other: Grid | None) -> bool:
    return one is None or other is None or one.agrees_with(other)
