"""Between a manifest's text and its content: YAML read with limits, faults put into words a user can act on."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from segcal.errors import ManifestError, MissingFileError

LIMIT_BYTES = 64 * 1024 * 1024
LIMIT_DEPTH = 16
_SHOWN_FAULTS = 5

# libyaml is some ten times faster, and a manifest of a thousand cases is 10,000 lines.
_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Only plain data is built (safe loader). Files above 64 MB, aliases and deep nesting are refused before anything
    is built: a few lines of aliases expand to billions of entries. A key written twice is refused too, because YAML
    readers silently keep the last.
    """
    text = _read_text(path)
    try:
        _check_events(path, text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            _refuse_repeated_keys(path, node)
            content = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ManifestError):
            raise
        raise ManifestError(f"{path}: not valid YAML: {_one_line(error)}. Correct that place") from error
    if not isinstance(content, dict):
        seen = "empty" if content is None else f"a {_yaml_noun(content)}"
        raise ManifestError(
            f"{path}: the file is {seen}, expected a mapping that starts with `version: 1`; see data_manifests/ "
            "for examples, or let `segcal manifest scan` write one"
        )
    return content


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            raw = stream.read(LIMIT_BYTES + 1)
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: there is no such manifest; check the path") from error
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read ({error.strerror or error}); expected a YAML file") from error
    if len(raw) > LIMIT_BYTES:
        raise ManifestError(
            f"{path}: larger than {LIMIT_BYTES // 2**20} MB, which no manifest needs; is this another file?"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ManifestError(
            f"{path}: not UTF-8 text (byte {error.start}); expected a YAML manifest, save it as UTF-8"
        ) from error


def _check_events(path: Path, text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > LIMIT_DEPTH:
                raise ManifestError(f"{path}: nested deeper than {LIMIT_DEPTH} levels; a manifest has four")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            line = 0 if event.start_mark is None else event.start_mark.line + 1
            raise ManifestError(f"{path}: line {line}: the alias `*{event.anchor}` is not allowed; write the value out")


def _refuse_repeated_keys(path: Path, node: yaml.Node | None) -> None:
    pending = [node]
    while pending:
        current = pending.pop()
        if isinstance(current, yaml.SequenceNode):
            pending.extend(current.value)
        elif isinstance(current, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in current.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        line = key.start_mark.line + 1
                        raise ManifestError(f"{path}: line {line}: the key `{key.value}` is written twice; keep one")
                    seen.add(key.value)
                pending.append(value)


def validation_message(path: object, error: ValidationError, model: type[BaseModel]) -> str:
    """Say where each fault lies (`cases[3].lable`), what was found there, and what to do."""
    faults: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        # One fault a place: a value that fits no branch of a union is reported by pydantic once for every branch.
        faults.setdefault(key_path(fault["loc"]), _fault(fault, model))
    shown = list(faults.values())
    if len(shown) == 1:
        return f"{path}: {shown[0]}"
    more = [f"... and {len(shown) - _SHOWN_FAULTS} more"] if len(shown) > _SHOWN_FAULTS else []
    return "\n  ".join([f"{path}: {len(shown)} faults", *shown[:_SHOWN_FAULTS], *more])


def _fault(fault: Any, model: type[BaseModel]) -> str:
    place = tuple(fault["loc"])
    kind, where = fault["type"], key_path(place)
    if kind == "extra_forbidden":
        known = _known_keys(model, place[:-1])
        close = get_close_matches(str(place[-1]), known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(known)}"
        return f"{where}: unknown key; {hint}"
    if kind == "missing":
        return f"{where}: missing; it has to be given"
    if kind == "value_error":
        text = str(fault["ctx"]["error"])
        return f"{where}: {text}" if where else text
    if kind == "string_type":
        return (
            f"{where}: {_shorten(fault['input'])} was read as a {_yaml_noun(fault['input'])}, expected text; "
            "put the value in quotes"
        )
    noun = {"tuple_type": "list", "model_type": "mapping", "int_type": "whole number", "float_type": "number"}.get(kind)
    expected = f"expected a {noun}" if noun else fault["msg"].removeprefix("Input ").removesuffix(" after validation")
    return f"{where}: {_shorten(fault['input'])}: {expected}"


def key_path(place: Sequence[object]) -> str:
    """`("cases", 3, "lable")` as `cases[3].lable`; names of union branches, which pydantic adds, are left out."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _is_branch(part):
            text += f".{part}" if text else str(part)
    return text


def _is_branch(part: object) -> bool:
    return str(part) in {"int", "str", "float", "constrained-int", "constrained-str"} or "[" in str(part)


def _known_keys(model: type[BaseModel], place: Sequence[object]) -> list[str]:
    current = model
    for part in place:
        if isinstance(part, str) and part in current.model_fields:
            current = _model_within(current.model_fields[part].annotation) or current
    return list(current.model_fields)


def _model_within(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and get_origin(annotation) is None:
        return annotation
    if get_origin(annotation) in (Union, UnionType, tuple):
        return next((found for part in get_args(annotation) if (found := _model_within(part))), None)
    return None


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else str(problem)


def _shorten(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _yaml_noun(value: object) -> str:
    names: tuple[tuple[type, str], ...] = (
        (bool, "yes/no value"),
        (int, "number"),
        (float, "number"),
        (str, "text"),
        (list, "list"),
        (dict, "mapping"),
    )
    return next((noun for kind, noun in names if isinstance(value, kind)), type(value).__name__)
