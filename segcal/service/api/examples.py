"""Examples in the OpenAPI file."""

from __future__ import annotations

from fastapi.openapi.models import Example

_SHA256 = "4f8e2c0f7b1d4a5e9c3b2a1f0e9d8c7b6a5f4e3d2c1b0a9f8e7d6c5b4a392817"

SUBMISSIONS: dict[str, Example] = {
    "apply": {
        "summary": "Calibrate a folder of nnU-Net outputs and look at every case",
        "value": {"kind": "apply", "calibrator": _SHA256, "folder": "/data/predictions/2026-03-01"},
    },
    "qa": {
        "summary": "Look at the cases of a manifest",
        "value": {"kind": "qa", "calibrator": _SHA256, "manifest": "/data/manifest.yaml", "batch": "night"},
    },
    "evaluate": {
        "summary": "Measure a calibrator on labelled cases",
        "value": {"kind": "evaluate", "calibrators": [_SHA256], "manifest": "/data/labelled.yaml", "subset": "test"},
    },
    "fit": {
        "summary": "Fit two calibrators",
        "value": {"kind": "fit", "manifest": "/data/labelled.yaml", "methods": ["ts", "cms_ap"]},
    },
    "study": {"summary": "The paper's table", "value": {"kind": "study", "manifest": "/data/labelled.yaml"}},
}
