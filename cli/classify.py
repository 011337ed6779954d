"""`segcal classify`: calibrate the scores of a plain classifier, without volumes and manifests."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from segcal.errors import UsageError

from .common import DebugOption, JsonOption, Output, QuietOption, calibrator_paths, epilog, name_and_file, sub_app

if TYPE_CHECKING:
    from segcal.classification.files import FittedMethod

app = sub_app("Calibrate a plain classifier: (n, C) logits or probabilities in npz, npy or CSV.")

DataArgument = Annotated[
    Path,
    typer.Argument(metavar="DATA", help=".npz, .csv or folder of .npy: logits or probabilities, labels, ..."),
]
ClassesOption = Annotated[str | None, typer.Option(metavar="A,B,...", help="Names of the classes; 0, 1, ... without.")]
ReplicatesOption = Annotated[int, typer.Option(min=1, help="Bootstrap replicates of the intervals.")]


@app.command("fit", epilog=epilog("segcal classify fit validation.npz --method dc --out dc.safetensors"))
def fit(
    data: DataArgument,
    out: Annotated[Path, typer.Option("--out", help="Calibrator file; with several methods a folder.")],
    method: Annotated[
        list[str] | None, typer.Option("--method", help="ts, dc, isotonic, ...; may be repeated.")
    ] = None,
    validation: Annotated[
        str | None, typer.Option(metavar="DATA|SHARE", help="Rows to tune on, or the share to draw (0.2).")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Settings tried when tuning.")] = None,
    lambda_: Annotated[float | None, typer.Option("--lambda", min=0, help="Fix the off-diagonal penalty.")] = None,
    mu: Annotated[float | None, typer.Option(min=0, help="Fix the bias penalty.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method, e.g. bins=20; may be repeated."),
    ] = None,
    classes: ClassesOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Fit calibrators on labelled rows.

    Every method of `segcal fit` that needs no neighbours, and isotonic, platt, beta, histogram, ts_sb_ece, ts_hb_ece,
    meta_acc, meta_mis; on data with features also kcal, vq, vq_dc, vq_nc, local_nets, mac_cal. docs/choosing.md says
    which is for what.
    """
    from segcal.classification.running import fit_methods

    output = Output(json=json, quiet=quiet)
    methods = list(dict.fromkeys(method or []))
    if not methods:
        raise UsageError("nothing to fit: give --method NAME (for most uses: --method ts or --method dc)")
    paths = calibrator_paths(methods, out)
    given = {"trials": trials, "lambda_": lambda_, "mu": mu}
    with output.stages() as progress:
        fitted = fit_methods(
            data,
            methods,
            validation=_validation(validation),
            classes=_names(classes),
            seed=seed,
            settings={**{k: v for k, v in given.items() if v is not None}, **_settings(setting or [])},
            progress=progress,
        )
    for name, made in fitted.items():
        made.save(paths[name])
        for text in made.info.warnings:
            output.warn(f"{name}: {text.removeprefix(f'{name}: ')}")
    output.table(
        ("method", "lambda", "mu", "fit NLL", "validation NLL", "keeps", "file"),
        [_row(made, paths[name]) for name, made in fitted.items()],
    )
    output.result({"calibrators": [_result(made, paths[name]) for name, made in fitted.items()]})


@app.command("apply", epilog=epilog("segcal classify apply dc.safetensors test.npz --out calibrated"))
def apply(
    calibrator: Annotated[Path, typer.Argument(metavar="CALIBRATOR", help="Written by `segcal classify fit`.")],
    data: DataArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the probabilities and run.json.")],
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write calibrated probabilities in the layout of the input, with its labels, and run.json.

    Labels are not needed. The result can be read by every `segcal classify` command again.
    """
    from segcal.classification.files import load
    from segcal.classification.running import apply as run_apply
    from segcal.counted import count
    from segcal.io.atomic import check_folder

    output = Output(json=json, quiet=quiet)
    check_folder(out)
    record = run_apply(load(calibrator), data, out)
    output.line(f"{out / record['output']}: {count(record['n_rows'], 'row')} with {record['method']}")
    output.line(f"the predicted class of {count(record['n_changed'], 'row')} changed")
    output.result({"out": out, **record})


@app.command("evaluate", epilog=epilog("segcal classify evaluate dc.safetensors test.npz --out results"))
def evaluate(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="[CALIBRATOR ...] DATA", help="Calibrator files (or NAME=FILE), then labelled rows."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tables, summary and report.html.")],
    bins: Annotated[int, typer.Option(min=1, help="Bins of all binned errors.")] = 15,
    classes: ClassesOption = None,
    replicates: ReplicatesOption = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    no_page: Annotated[bool, typer.Option("--no-page", help="Do not make report.html.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure calibrators and the uncalibrated scores on labelled rows, and make a report page.

    Intervals come from a bootstrap over rows, or over subjects where the data names them.
    """
    from segcal.classification.evaluation import check_results_folder
    from segcal.classification.running import evaluate as run_evaluation
    from segcal.classification.tables import HEADLINE, TITLES
    from segcal.evaluation.summary import BootstrapSettings
    from segcal.evaluation.tables import cell

    output = Output(json=json, quiet=quiet)
    check_results_folder(out)
    *calibrators, data = inputs
    if data.endswith(".safetensors"):
        raise UsageError(f"{data} is a calibrator; the last argument is the data: [CALIBRATOR ...] DATA")
    with output.stages() as progress:
        result = run_evaluation(
            Path(data),
            _calibrators(calibrators),
            classes=_names(classes),
            n_bins=bins,
            bootstrap=BootstrapSettings(n_replicates=replicates, seed=seed),
            progress=progress,
        )
    result.save(out, page=not no_page)
    for text in result.summary["warnings"]:
        output.warn(text)
    pipelines = result.summary["pipelines"]
    output.table(
        ("pipeline", *(TITLES[column] for column in HEADLINE)),
        [(p["name"], *(cell(p, column) for column in HEADLINE)) for p in pipelines],
    )
    output.line(f"{quote(str(out))}: summary.json, table.md, bins.npz{'' if no_page else ', report.html'}")
    output.result({"out": out, **result.summary})


def _calibrators(given: list[str]) -> dict[str, FittedMethod]:
    """By the name their row carries: given as NAME=FILE, or that of the method."""
    from segcal.classification.files import load

    named: dict[str, FittedMethod] = {}
    for text in given:
        name, path = name_and_file(text)
        fitted = load(path)
        chosen = name or fitted.info.method
        if chosen in named:
            raise UsageError(f"two calibrators are both called {chosen}; name one of them: NAME=FILE")
        named[chosen] = fitted
    return named


def _validation(given: str | None) -> Path | float | None:
    if given is None:
        return None
    try:
        return float(given)
    except ValueError:
        return Path(given)


def _names(given: str | None) -> list[str] | None:
    return None if given is None else [name.strip() for name in given.split(",")]


def _settings(given: list[str]) -> dict[str, Any]:
    """NAME=VALUE; a value is a number, true, false or text."""
    found: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise UsageError(f"--set {text}: expected NAME=VALUE, for example --set bins=20")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _row(fitted: FittedMethod, path: Path) -> tuple[object, ...]:
    info = fitted.info
    numbers = ((info.lambda_, ".2g"), (info.mu, ".2g"), (info.fit_nll, ".6f"), (info.validation_nll, ".6f"))
    return (
        info.method,
        *("-" if value is None else format(value, digits) for value, digits in numbers),
        info.preserves or "-",
        path,
    )


def _result(fitted: FittedMethod, path: Path) -> dict[str, object]:
    from segcal.classification.running import file_sha256

    values = fitted.info.model_dump(mode="json", by_alias=True)
    return {**values, "file": str(path), "sha256": file_sha256(fitted)}
