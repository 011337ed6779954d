"""YAML files that people write: only plain data, read with limits; what is wrong is said with name and line."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from typing import Any

import yaml

from segcal.errors import MissingFileError, SegcalError

LIMIT_BYTES = 64 * 1024 * 1024
LIMIT_DEPTH = 16

# libyaml is some ten times faster, and a manifest of a thousand cases is 10,000 lines.
_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _TextError(ValueError):
    """What is wrong with a text; whoever opened the file adds its name."""


def read_yaml(file: Traversable, *, name: str, fault: type[SegcalError], expected: str) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Only plain data is built (safe loader). Files above 64 MB, aliases and deep nesting are refused before anything
    is built: a few lines of aliases expand to billions of entries. A key written twice is refused too, because YAML
    readers silently keep the last.

    Args:
        file: a path, or a file of the package.
        name: of the file in messages.
        fault: class of the errors.
        expected: what should stand there, for messages.

    Raises:
        fault: the file is no such YAML.
        MissingFileError: there is no such file.
    """
    try:
        content = _plain_data(_decoded(_read(file)))
    except FileNotFoundError as error:
        raise MissingFileError(f"{name}: there is no such file; check the path") from error
    except OSError as error:
        raise fault(f"{name}: cannot be read ({error.strerror or error}); expected a YAML file") from error
    except _TextError as error:
        raise fault(f"{name}: {error}") from error
    if not isinstance(content, dict):
        seen = "empty" if content is None else f"a {yaml_noun(content)}"
        raise fault(f"{name}: the file is {seen}, expected {expected}")
    return content


def shortened(value: object, limit: int = 60) -> str:
    """A value as messages show it."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        return "a number too long to show"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def yaml_noun(value: object) -> str:
    """What a value is in the words of the file."""
    names: tuple[tuple[type, str], ...] = (
        (bool, "yes/no value"),
        (int, "number"),
        (float, "number"),
        (str, "text"),
        (list, "list"),
        (dict, "mapping"),
    )
    return next((noun for kind, noun in names if isinstance(value, kind)), type(value).__name__)


def _read(file: Traversable) -> bytes:
    with file.open("rb") as stream:
        raw: bytes = stream.read(LIMIT_BYTES + 1)
    if len(raw) > LIMIT_BYTES:
        raise _TextError(f"larger than {LIMIT_BYTES // 2**20} MB, which no such file needs; is this another file?")
    return raw


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _TextError(
            f"not UTF-8 text (byte {error.start}); expected YAML in UTF-8; is this another file?"
        ) from error


def _plain_data(text: str) -> Any:
    try:
        _check_events(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            _refuse_repeated_keys(node)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except _TextError:
        raise
    # PyYAML answers 2024-99-99, `!!int ''` or `!!timestamp x` with whatever its own code stumbled over.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise _TextError(f"not valid YAML: {_one_line(error)}. Correct that place") from error


def _check_events(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > LIMIT_DEPTH:
                raise _TextError(f"nested deeper than {LIMIT_DEPTH} levels, which no such file needs")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            line = 0 if event.start_mark is None else event.start_mark.line + 1
            raise _TextError(f"line {line}: the alias `*{event.anchor}` is not allowed; write the value out")


def _refuse_repeated_keys(node: yaml.Node | None) -> None:
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
                        raise _TextError(f"line {line}: the key `{key.value}` is written twice; keep one")
                    seen.add(key.value)
                pending.append(value)


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else str(problem)
