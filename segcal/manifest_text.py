"""What is wrong with a manifest's content, put into words a user can act on."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from segcal.yaml_file import shortened, yaml_noun

_SHOWN_FAULTS = 5


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
            f"{where}: {shortened(fault['input'])} was read as a {yaml_noun(fault['input'])}, expected text; "
            "put the value in quotes"
        )
    noun = {"tuple_type": "list", "model_type": "mapping", "int_type": "whole number", "float_type": "number"}.get(kind)
    expected = f"expected a {noun}" if noun else fault["msg"].removeprefix("Input ").removesuffix(" after validation")
    return f"{where}: {shortened(fault['input'])}: {expected}"


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
