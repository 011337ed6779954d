"""Trainer classes for nnU-Net, in a folder of their own: `nnUNet_extTrainer` names it, and nnU-Net imports all of it.

    export nnUNet_extTrainer=$(python -c "from segcal.nnunet.trainers import FOLDER; print(FOLDER)")
    nnUNetv2_train DATASET 3d_fullres 0 -tr nnUNetTrainerSegcal_mmce_m

Importing this package imports nothing of nnU-Net.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = str(Path(__file__).resolve().parent)
