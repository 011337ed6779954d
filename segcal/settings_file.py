"""Settings files: YAML into frozen, validated models; what is misspelt is an error that names the nearest word."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from segcal.errors import MissingFileError, SettingsError
from segcal.yaml_file import read_yaml, shortened

CONFIG_PACKAGE = "segcal_configs"


def _not_a_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number, got true or false")
    return value


# PyYAML reads 1e-6 (no dot) as text, so numbers written as text are taken as numbers.
Number = Annotated[float, BeforeValidator(_not_a_bool)]
Whole = Annotated[int, BeforeValidator(_not_a_bool)]


class SettingsModel(BaseModel):
    """Frozen and closed: unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

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


Model = TypeVar("Model", bound=SettingsModel)


def read_settings(name_or_path: str | Path, model: type[Model], names: Mapping[str, str]) -> Model:
    """Read settings: a name is looked up among the shipped files, a path (a separator, or .yaml at the end) is opened.

    Args:
        names: of the shipped settings of this kind, with the file each lies in.

    Raises:
        SettingsError: unknown name, key or value; says which and what comes nearest.
        MissingFileError: there is no such file.
    """
    path, name = Path(name_or_path), str(name_or_path)
    listed = ", ".join(names)
    if isinstance(name_or_path, Path) or path.suffix in (".yaml", ".yml") or "/" in name or os.sep in name:
        if not path.is_file():
            raise MissingFileError(f"{name}: no such settings file; shipped settings go by name: {listed}")
        return _parse(path, model, source=name)
    if name not in names:
        close = get_close_matches(name, names, n=3)
        hint = f"the nearest are {', '.join(close)}" if close else f"there are {listed}"
        raise SettingsError(f"no settings named `{name}`; {hint}. A file of your own is named with its .yaml ending")
    return _parse(files(CONFIG_PACKAGE) / names[name], model, source=f"settings `{name}`")


def shipped_files() -> list[str]:
    """File names of all settings that ship with the package."""
    names = (entry.name for entry in files(CONFIG_PACKAGE).iterdir())
    return sorted(name for name in names if name.endswith(".yaml"))


def _parse(file: Traversable, model: type[Model], *, source: str) -> Model:
    values = read_yaml(file, name=source, fault=SettingsError, expected="`key: value` lines")
    return model.parse(values, source=source)


def nearest_of(word: str, known: Mapping[str, object] | list[str]) -> str:
    matches = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean `{matches[0]}`?" if matches else f", known are {', '.join(known)}"


def _problem(model: type[BaseModel], detail: dict[str, Any]) -> str:
    """One pydantic finding in the words of the settings file."""
    where = [str(part) for part in detail["loc"]]
    key = ".".join(where)
    if detail["type"] == "extra_forbidden":
        return f"unknown key `{key}`{nearest_of(where[-1], _keys(model, where[:-1]))}"
    if detail["type"] == "missing":
        return f"`{key}` is missing"
    message = detail["msg"].removeprefix("Value error, ")
    seen = "" if detail["type"] == "value_error" else f", got {shortened(detail['input'])}"
    return f"`{key}`: {message}{seen}" if key else f"{message}{seen}"


def _keys(model: type[BaseModel], where: list[str]) -> list[str]:
    """The keys known at a place of the settings, as files spell them."""
    for part in where:
        if part.isdecimal():  # a place in a list; the field before it already says what the list holds
            continue
        named = {field.alias or name: field for name, field in model.model_fields.items()}
        model = _inner_model(named[part].annotation)
    return [field.alias or name for name, field in model.model_fields.items()]


def _inner_model(annotation: Any) -> type[BaseModel]:
    """The model a field holds, itself or inside a tuple or an optional."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [_inner_model(part) for part in get_args(annotation) if part not in (type(None), Ellipsis)]
    return found[0]
