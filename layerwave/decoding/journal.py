"""The journal of a long run: a line that names the run, then one for each finished piece of its work.

A killed run reads it back and goes on with the first piece that it lacks.
"""

import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwave.errors import LayerwaveError
from layerwave.files.reading import parse_json, shown, typed
from layerwave.files.writing import Lines

_ANEW = "remove it to start anew"


class _OtherRunError(LayerwaveError):
    """The file is whole, and of another run."""


@dataclass(frozen=True)
class Journal:
    """run: what tells this run from others, as JSON can say it."""

    path: Path
    run: Mapping[str, Any]

    @classmethod
    def beside(cls, out: Path, run: Mapping[str, Any]) -> "Journal":
        """The journal of a run that shall end in the file `out`."""
        return cls(out.with_name(out.name + ".partial"), run)

    def resume(self, kind: Any) -> list[Any]:
        """Opens the journal; returns the records in it, each as the annotated type. What a kill left of a line is cut
        off.

        Raises:
            LayerwaveError: the journal is damaged, of another run, or cannot be written.
        """
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise LayerwaveError(f"{self.path} cannot be read ({error.strerror}): {_ANEW}") from None
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:
            self.path.unlink(missing_ok=True)
            self.append(self.run)
            return []
        lines = enumerate(whole.split(b"\n")[:-1], 1)
        try:
            run, *found = [parse_json(line, f"line {number}", _ANEW) for number, line in lines]
            require_same_run(run, self.run, self.path)
            records = [typed(kind, record, f"line {number}") for number, record in enumerate(found, 2)]
        except _OtherRunError:
            raise
        except LayerwaveError as error:
            raise LayerwaveError(f"{self.path} is damaged ({error}): {_ANEW}") from None
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        return records

    def append(self, record: Any) -> None:
        """A line, on disk before the next piece begins: a kill leaves whole lines and at most one torn.

        Raises `LayerwaveError` when it cannot be written.
        """
        with closing(Lines(self.path)) as lines:
            lines.append(json.dumps(record, ensure_ascii=False))
            lines.sync()

    def remove(self) -> None:
        self.path.unlink()


def require_same_run(found: Any, wanted: Mapping[str, Any], path: Path) -> None:
    """Raises `LayerwaveError` where the file at `path` is of a run that differs from the wanted one."""
    found = typed(dict[str, Any], found, "its description of the run")
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    if differing:
        raise _OtherRunError(
            f"{path} is of a run with other {', '.join(differing)} ({shown(found.get(differing[0]))}, now "
            f"{shown(wanted[differing[0]])}): repeat its settings, remove it, or give another --out"
        )
