"""Small files that others may have written: JSON and names, held to what was expected before anything is made of them.

Only `LayerwaveError` leaves. `typed` takes a record apart by the annotations of the class that it shall become, so that
a number which came as text is a fault of the file and not of the arithmetic after it.
"""

import json
import math
import os
import reprlib
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from layerwave.errors import LayerwaveError

_LONGEST = 255
"""Characters of a file's name."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlevel = 3


def shown(value: object) -> str:
    """A value from a file as it stands in a message: its repr, cut, however large or often repeated its parts are."""
    return _SHORT.repr(value)


def parse_json(text: str | bytes, source: str, remedy: str) -> Any:
    """The JSON value of a text; `source` and `remedy` begin and end the message.

    Raises:
        LayerwaveError: not UTF-8, not JSON, nested too deeply, or an object that gives a key twice: readers differ in
            which one they take.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise LayerwaveError(f"{source} cannot be read (nested too deeply): {remedy}") from None
    except ValueError as error:  # JSON, UTF-8, and numbers of too many digits
        raise LayerwaveError(f"{source} cannot be read (not valid JSON: {error}): {remedy}") from None


def read_json(path: str | os.PathLike[str], remedy: str) -> Any:
    """The JSON value in a file. Raises `LayerwaveError` as `parse_json` does, or where there is no such file."""
    path = Path(path)
    try:
        if not path.is_file():
            raise LayerwaveError(f"{path} is missing or cannot be read: {remedy}")
        content = path.read_bytes()
    except OSError as error:
        raise LayerwaveError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    return parse_json(content, str(path), remedy)


def read_object(path: str | os.PathLike[str], remedy: str) -> dict[str, Any]:
    """The same, where anything but a JSON object is a fault."""
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise LayerwaveError(f"{path}: got a JSON {type(content).__name__}, expected an object: {remedy}")
    return content


def inside(folder: Path, name: object, remedy: str) -> Path:
    """The file of this name in the folder, wherever the name came from.

    A link may lead to another file of the folder, or, from a snapshot in the cache of the Hugging Face hub, to the
    `blobs` beside the snapshots, where the hub keeps all files.

    Raises:
        LayerwaveError: a name that is a path (`..`, absolute), or a link that leads out of the folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\\", "\0"} & set(name) or len(name) > _LONGEST:
        raise LayerwaveError(f"{folder}: {shown(name)} is no plain file name, and other places are not read: {remedy}")
    path = folder / name
    try:
        home, found = folder.resolve(), path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # half a surrogate pair, links in a circle
        raise LayerwaveError(f"{path} cannot be read ({error}): {remedy}") from None
    snapshots = home.parent
    blobs = snapshots.parent / "blobs" if snapshots.name == "snapshots" else None
    if not found.is_relative_to(home) and (blobs is None or found.parent != blobs):
        raise LayerwaveError(f"{path} is a link that leads out of its folder, to {found}: {remedy}")
    return path


def typed(kind: Any, value: Any, where: str) -> Any:
    """A value from JSON as the annotated type: dataclasses from objects, tuples from lists, floats from any number.

    Parts that a reader of their own has made dataclasses of are taken as they are.

    Raises:
        LayerwaveError: a value of another type, not a number, or an object with missing or unknown keys; the message
            begins with `where` and the path to it. And what the dataclass itself refuses.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return value if isinstance(value, kind) else _dataclass(kind, value, where)
    if origin in (Union, types.UnionType):
        return _union(kind, arguments, value, where)
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if origin in (tuple, Sequence) and isinstance(value, list | tuple):
        variadic = origin is Sequence or arguments[-1] is Ellipsis
        kinds = [arguments[0]] * len(value) if variadic else arguments
        if len(kinds) == len(value):
            return tuple(typed(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: typed(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value, where)
    if origin is None and type(value) is kind:
        return value
    raise LayerwaveError(f"{where} is {shown(value)}, expected {_name(kind)}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, times),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(key)} stands {times} times in one object")
    return found


def _dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise LayerwaveError(f"{where} is {shown(value)}, expected an object")
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind) if field.init}
    needed = {n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    missing, unknown = sorted(needed - value.keys()), sorted(value.keys() - known.keys())
    if missing or unknown:
        raise LayerwaveError(f"{where} lacks {missing} and has the unknown {shown(unknown)}")
    return kind(**{name: typed(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _union(kind: Any, arguments: tuple, value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    kinds = [one for one in arguments if one is not type(None)]
    for one in kinds:
        try:
            return typed(one, value, where)
        except LayerwaveError:
            if len(kinds) == 1:
                raise
    raise LayerwaveError(f"{where} is {shown(value)}, expected {_name(kind)}")


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    if math.isnan(number):
        raise LayerwaveError(f"{where} is {shown(value)}, expected a number")
    return number


def _name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_name, arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    return names.get(kind) or ("an object" if origin in (dict, Mapping) else "a list" if arguments else str(kind))
