"""nnU-Net's own programs, run as a child process: `python nnunet_run.py train`, or `… commands FILE`.

The environment variables nnUNet_raw, nnUNet_preprocessed and nnUNet_results say where. Training is nnU-Net's with
smaller plans and fewer steps; the commands are nnU-Net's console commands, one JSON list of words a line, run one after
the other in one process because importing torch takes longer than any of them.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

CONFIGURATION = "3d_fullres"
EPOCHS, ITERATIONS, VALIDATION_ITERATIONS = 4, 20, 2


def train(dataset: int, n_folds: int) -> None:
    """Fingerprint, plan, preprocess, and per fold train and validate --npz."""
    import numpy as np
    import torch
    from nnunetv2.experiment_planning import plan_and_preprocess_api as api
    from nnunetv2.run.run_training import run_training
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    torch.set_num_threads(1)
    os.environ["nnUNet_n_proc_DA"] = "1"  # noqa: SIM112  # planning cannot do with 0
    api.extract_fingerprints([dataset], num_processes=1, check_dataset_integrity=False)
    identifier = api.plan_experiments([dataset])
    (path,) = Path(os.environ["nnUNet_preprocessed"]).glob(f"Dataset{dataset}_*/{identifier}.json")  # noqa: SIM112
    plans = json.loads(path.read_bytes())
    shrink(plans["configurations"][CONFIGURATION])
    path.write_text(json.dumps(plans))
    api.preprocess([dataset], identifier, (CONFIGURATION,), (1,))

    os.environ["nnUNet_n_proc_DA"] = "0"  # noqa: SIM112  # augment in this process
    plain_init = nnUNetTrainer.__init__

    def short(self: Any, *args: Any, **named: Any) -> None:
        plain_init(self, *args, **named)
        self.num_epochs, self.num_iterations_per_epoch = EPOCHS, ITERATIONS
        self.num_val_iterations_per_epoch = VALIDATION_ITERATIONS

    # The signature is what nnU-Net notes as init_args in the checkpoint.
    short.__signature__ = inspect.signature(plain_init)  # type: ignore[attr-defined]
    nnUNetTrainer.__init__ = short
    for fold in range(n_folds):
        np.random.seed(fold)
        torch.manual_seed(fold)
        run_training(
            str(dataset), CONFIGURATION, fold, export_validation_probabilities=True, device=torch.device("cpu")
        )


def shrink(configuration: dict[str, Any]) -> None:
    """A network that trains in seconds; fewer than three stages would divide by zero in the deep supervision."""
    kwargs = configuration["architecture"]["arch_kwargs"]
    for key in ("kernel_sizes", "strides"):
        kwargs[key] = kwargs[key][:1] + [[2, 2, 2] if key == "strides" else [3, 3, 3]] * 2
    kwargs.update(
        n_stages=3, features_per_stage=[6, 12, 16], n_conv_per_stage=[1, 1, 1], n_conv_per_stage_decoder=[1, 1]
    )
    configuration.update(patch_size=[8, 16, 16], batch_size=2)


def commands(path: Path) -> None:
    """Run console commands of nnU-Net."""
    from nnunetv2.ensembling import ensemble
    from nnunetv2.inference import predict_from_raw_data

    # nnU-Net takes all cores, and their number changes the rounding of the network's outputs.
    multiprocessing.cpu_count = lambda: 1  # type: ignore[assignment]
    known = {
        "nnUNetv2_predict": predict_from_raw_data.predict_entry_point,
        "nnUNetv2_ensemble": ensemble.entry_point_ensemble_folders,
    }
    for line in path.read_text().splitlines():
        sys.argv = json.loads(line)
        known[sys.argv[0]]()


if __name__ == "__main__":  # the worker processes of nnU-Net import this file
    if sys.argv[1] == "train":
        train(int(sys.argv[2]), int(sys.argv[3]))
    else:
        commands(Path(sys.argv[2]))
