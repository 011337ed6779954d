"""Which files may be called a case's own: what a run writes, what it may replace and what it may remove."""

from __future__ import annotations


def possible_files(case_id: str) -> tuple[str, ...]:
    """Every name a run may ever give to a file of this case, whatever its settings and geometry."""
    folders = ("confidence", "entropy")
    extras = tuple(f"{folder}/{case_id}{ending}" for folder in folders for ending in (".nii.gz", ".npz"))
    maps = (f"{case_id}.npz", f"probabilities/{case_id}.nii.gz")
    return (*maps, *extras, f"{case_id}.nii.gz", f"{case_id}.png", f"segmentation/{case_id}.npz")
