"""The folder of a training run: what the run is, its checkpoints, and how far it has come.

RUN/run.json         identity: target, data, vocabulary, layer sets, settings
RUN/checkpoints/     Orbax: parameters, moments and step, each checkpoint whole or not at all
RUN/metrics.jsonl    see metrics.py
RUN/drafts/5-23-35/  the trained drafts, see checkpoint.py
"""

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from layerwave.drafts.config import draft_name
from layerwave.errors import LayerwaveError
from layerwave.files.identity import require_same
from layerwave.files.writing import cannot_write, make_folder, sync

SCHEMA, VERSION = "layerwave.run", 1
KEPT = 2
"""Checkpoints that stay: the newest might be of a disk that is about to fail."""


@dataclass(frozen=True)
class Run:
    """A folder that belongs to one training run. Checkpoints are `{name: array}` trees."""

    folder: Path
    manager: ocp.CheckpointManager

    @classmethod
    def open(cls, folder: str | os.PathLike[str], identity: Mapping[str, Any]) -> "Run":
        """A new folder, or that of the same run.

        Raises:
            LayerwaveError: the folder holds something else, or a run that differs (every difference is named), or it
                cannot be written.
        """
        folder = Path(folder).absolute()
        path = folder / "run.json"
        if path.is_file():
            require_same(path, SCHEMA, VERSION, identity)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise LayerwaveError(f"{folder} is there and holds no run of `layerwave train`: give another --out")
        else:
            make_folder(folder)
            require_same(path, SCHEMA, VERSION, identity)
        _clear(folder / "checkpoints")
        logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax reports every write
        # Synchronous: on the CPU an array in the background's hands could be donated to the next step.
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
        return cls(folder, ocp.CheckpointManager(folder / "checkpoints", options=options))

    @property
    def step(self) -> int:
        """Steps behind the newest checkpoint; 0 without one."""
        return self.manager.latest_step() or 0

    def save(self, step: int, tree: Any) -> None:
        """Writes a checkpoint of the arrays of any pytree.

        Raises `LayerwaveError` where it cannot; the one before it is as it was.
        """
        path = self.folder / "checkpoints" / str(step)
        try:
            self.manager.save(step, args=ocp.args.StandardSave(_by_path(tree)))
            for item in (*path.rglob("*"), path, path.parent):  # Orbax moves it there before it is on disk
                sync(item)
        except Exception as error:  # Orbax and TensorStore tell a full disk in errors of many types
            raise cannot_write(path, error, "make its folder writable, then run the same command again") from error

    def restore(self, like: Any) -> Any:
        """The newest checkpoint, in the structure, dtypes and shardings of `like`. Raises `LayerwaveError`."""
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_path(like))
        try:
            found = self.manager.restore(self.step, args=ocp.args.StandardRestore(wanted))
        except Exception as error:  # of whatever type its parser meets
            path = self.folder / "checkpoints" / str(self.step)
            reason = " ".join(str(error).split())[:200]
            raise LayerwaveError(
                f"the checkpoint {path} is damaged ({reason}): remove it, and the run goes on from the one before"
            ) from error
        return jax.tree.unflatten(jax.tree.structure(like), [found[path] for path in _by_path(like)])

    def draft_folder(self, layers: Sequence[int]) -> Path:
        return self.folder / "drafts" / draft_name(layers)

    def close(self) -> None:
        self.manager.close()


def _clear(checkpoints: Path) -> None:
    """Removes what a killed run left: checkpoints half-written, and those that newer ones were about to replace."""
    found = list(checkpoints.glob("*"))
    steps = sorted((path for path in found if path.name.isdigit()), key=lambda path: int(path.name))
    for path in set(found) - set(steps[-KEPT:]):
        shutil.rmtree(path, ignore_errors=True)


def _by_path(tree: Any) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
