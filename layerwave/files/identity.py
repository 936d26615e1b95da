"""Which work a folder belongs to: written when the work begins, compared when it goes on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerwave.errors import LayerwaveError
from layerwave.files.reading import read_object, shown
from layerwave.files.writing import write_json


def require_same(path: Path, schema: str, version: int, identity: Mapping[str, Any]) -> None:
    """Writes the identity to the JSON file `path`, or compares it with the one that is there.

    Raises:
      LayerwaveError: it is another one (every difference is named), or the file cannot be read or written.
    """
    if not path.is_file():
        write_json(path, {"schema": schema, "version": version, **identity})
        return
    found = read_object(path, "give another --out")
    if (found.pop("schema", None), found.pop("version", None)) != (schema, version):
        raise LayerwaveError(f"{path} is not of a run that this version can resume: give another --out")
    ours = _flat(json.loads(json.dumps(identity)))
    theirs = _flat(found)
    differences = [
        f"{key} was {shown(theirs.get(key))}, is {shown(ours.get(key))}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]
    if differences:
        raise LayerwaveError(
            f"{path.parent} holds another run: {'; '.join(differences)}; resume it as it was, or give another --out"
        )


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`{"settings": {"seed": 0}}` to `{"settings.seed": 0}`."""
    flat = {}
    for key, value in tree.items():
        inner = _flat(value) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{key}.{name}".rstrip("."): leaf for name, leaf in inner.items()}
    return flat
