"""Settings of one pipeline: which method on which pooling, how it is solved, what is tuned and over which range.

The defaults are those of SEG App. B. Every pipeline has a commented file in `configs/`, which ships with the package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from segcal.errors import MissingFileError, SettingsError
from segcal.types import Pooling

CONFIG_PACKAGE = "segcal_configs"


def _not_a_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number, got true or false")
    return value


# PyYAML reads 1e-6 (no dot) as text, so numbers written as text are taken as numbers.
Number = Annotated[float, BeforeValidator(_not_a_bool)]
Whole = Annotated[int, BeforeValidator(_not_a_bool)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class LogRange(_Model):
    """A hyper-parameter that is tuned: exactly zero (if `zero`) or log-uniform between `low` and `high`."""

    zero: bool = False
    low: Annotated[Number, Field(gt=0)]
    high: Annotated[Number, Field(gt=0)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) is above high ({self.high:g})")
        return self


class Choices(_Model):
    """A hyper-parameter that is tuned over a short list."""

    choices: Annotated[tuple[Annotated[Whole, Field(gt=0)], ...], Field(min_length=1)]


class SearchSpace(_Model):
    """What tuning may try. Methods use what they have: λ and µ the matrix families, α local temperature scaling,
    learning rate and patience the `adam` solver and local temperature scaling."""

    lambda_: LogRange = Field(default=LogRange(zero=True, low=1e-6, high=1e-1), alias="lambda")
    mu: LogRange = LogRange(zero=True, low=1e-6, high=1e-1)
    alpha: LogRange = LogRange(zero=True, low=1e-6, high=1e-2)
    learning_rate: LogRange = LogRange(low=1e-4, high=3e-2)
    patience: Choices = Choices(choices=(10, 20, 50))


class PipelineSettings(_Model):
    """One pipeline, complete: the same settings, data and seed give the same calibrator.

    Attributes:
        method: registry key of the calibrator.
        pooling: mean of logits or mean of probabilities.
        solver: `exact` (convex solvers) or `adam` (the paper's protocol).
        trials: hyper-parameter settings that tuning tries.
        rows: voxels the data are condensed to before fitting.
        max_patches: in-plane patches kept for methods that look at neighbours.
        seed: decides samples, drawn splits and trials.
        objective: what tuning minimises on the validation cases.
        lambda_: fixes λ instead of tuning it (`lambda` in files).
        mu: fixes µ instead of tuning it.
        space: the ranges of what is tuned.
    """

    method: str
    pooling: Pooling = "logits"
    solver: Literal["exact", "adam"] = "exact"
    trials: Annotated[Whole, Field(ge=1)] = 20
    rows: Annotated[Whole, Field(ge=1_000)] = 120_000
    max_patches: Annotated[Whole, Field(ge=1)] = 8_192
    seed: Annotated[Whole, Field(ge=0)] = 0
    objective: Literal["nll"] = "nll"
    lambda_: Annotated[Number, Field(ge=0)] | None = Field(default=None, alias="lambda")
    mu: Annotated[Number, Field(ge=0)] | None = None
    space: SearchSpace = SearchSpace()

    @field_validator("method")
    @classmethod
    def _known_method(cls, method: str) -> str:
        from segcal.calibrators import CALIBRATORS  # here, because it brings torch and settings are also read without

        if method not in CALIBRATORS:
            raise ValueError(f"unknown method `{method}`{_nearest(method, CALIBRATORS)}")
        return method

    @property
    def name(self) -> str:
        """The pipeline as tables name it: `cms_ap(z)` on pooled logits, `cms_ap(p)` on pooled probabilities."""
        return f"{self.method}({'z' if self.pooling == 'logits' else 'p'})"

    @classmethod
    def parse(cls, values: Mapping[str, object], *, source: str) -> Self:
        """Check a mapping; a SettingsError names `source` and every key or value that is wrong."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problems = "; ".join(_problem(cls, dict(detail)) for detail in error.errors(include_url=False))
            raise SettingsError(f"{source}: {problems}") from None

    def changed(self, source: str = "settings", **changes: object) -> Self:
        """A checked copy with some values replaced; None leaves a value as it is, so unset options can be passed on."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        given = {name: value for name, value in changes.items() if value is not None}
        return self.parse({**values, **given}, source=source)


def load_settings(name_or_path: str | Path) -> PipelineSettings:
    """Read settings: a name is looked up among the shipped files, a path (a separator, or .yaml at the end) is opened.

    Raises:
        SettingsError: unknown name, key or value; says which and what comes nearest.
        MissingFileError: there is no such file.
    """
    path, name = Path(name_or_path), str(name_or_path)
    if isinstance(name_or_path, Path) or path.suffix in (".yaml", ".yml") or "/" in name or os.sep in name:
        if not path.is_file():
            raise MissingFileError(f"{name}: no such settings file; shipped settings go by name: {_listed()}")
        return _parse_yaml(path.read_bytes(), source=name)
    if name not in config_names():
        close = get_close_matches(name, config_names(), n=3)
        hint = f"the nearest are {', '.join(close)}" if close else f"there are {_listed()}"
        raise SettingsError(f"no settings named `{name}`; {hint}. A file of your own is named with its .yaml ending")
    return _parse_yaml((files(CONFIG_PACKAGE) / f"{name}.yaml").read_bytes(), source=f"settings `{name}`")


def config_names() -> list[str]:
    """Names of all settings that ship with the package."""
    names = (entry.name for entry in files(CONFIG_PACKAGE).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.YAMLError(f"`{key.value}` stands twice (line {key.start_mark.line + 1})")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _parse_yaml(content: bytes, *, source: str) -> PipelineSettings:
    try:
        values = yaml.load(content, Loader=_UniqueKeys)  # a SafeLoader: plain data only
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{source}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{source}: expected `key: value` lines, found {type(values).__name__}")
    return PipelineSettings.parse(values, source=source)


def _listed() -> str:
    return ", ".join(config_names())


def _nearest(word: str, known: Mapping[str, object] | list[str]) -> str:
    matches = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean `{matches[0]}`?" if matches else f", known are {', '.join(known)}"


def _problem(model: type[BaseModel], detail: dict[str, Any]) -> str:
    """One pydantic finding in the words of the settings file."""
    where = [str(part) for part in detail["loc"]]
    key = ".".join(where)
    if detail["type"] == "extra_forbidden":
        return f"unknown key `{key}`{_nearest(where[-1], _keys(model, where[:-1]))}"
    if detail["type"] == "missing":
        return f"`{key}` is missing"
    message = detail["msg"].removeprefix("Value error, ")
    seen = "" if detail["type"] == "value_error" else f", got {detail['input']!r}"
    return f"`{key}`: {message}{seen}" if key else f"{message}{seen}"


def _keys(model: type[BaseModel], where: list[str]) -> list[str]:
    """The keys known at a place of the settings, as files spell them."""
    for part in where:
        named = {field.alias or name: field for name, field in model.model_fields.items()}
        inner = named[part].annotation
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel)
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]
