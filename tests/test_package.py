"""The house: which room may import which, and what importing the package does not do."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import layerwave

PACKAGE = Path(layerwave.__file__).parent
ROOMS = (
    "files",
    "kernels",
    "targets",
    "calibration",
    "selection",
    "drafts",
    "decoding",
    "validation",
    "interop",
    "report",
    "bench",
    "commands",
)
NEUTRAL = {"doctor", "errors", "interruption", "progress", "warned"}
"""Modules at the top level that any room may import; they import no room."""


def imported_rooms(path: Path) -> set[str]:
    """First parts below `layerwave` of everything that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            names = [
                f"{node.module}.{alias.name}" if node.module == "layerwave" else node.module for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("layerwave.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/**/*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path):
    room = path.relative_to(PACKAGE).parts[0]
    below = set(ROOMS[: ROOMS.index(room)])
    assert imported_rooms(path) <= below | {room} | NEUTRAL


def test_neutral_modules_import_no_room():
    for name in NEUTRAL:
        assert not imported_rooms(PACKAGE / f"{name}.py") & set(ROOMS)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_warnings_go_where_artifacts_keep_them(path):
    """Only `warned.warn`; and files are opened to be written by files/writing.py and the lock alone."""
    name = path.relative_to(PACKAGE).as_posix()
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    assert name == "warned.py" or not calls & {"logger.warning", "warnings.warn"}
    if name not in ("files/writing.py", "files/lock.py"):
        assert not calls & {"os.replace", "os.rename", "os.open", "os.write", "shutil.move", "np.save", "np.savez"}


WRITERS = ("write_text", "write_bytes", "savefig", "save_file", "write_tensors")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_writer_writes_whole_files(path):
    """What is given to a writer was given by `whole_file` or `whole_directory`, or is no file."""
    for node in ast.walk(tree := ast.parse(path.read_text())):
        if not isinstance(node, ast.With):
            continue
        items = [ast.unparse(item.context_expr).split("(")[0] for item in node.items]
        for inner in ast.walk(node) if {"whole_file", "whole_directory"} & set(items) else ():
            inner.whole = True
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in WRITERS:
            text = ast.unparse(node)
            no_file = text.startswith(("figure.savefig(text", "_FORGET.write_text"))  # memory; a switch in /proc
            assert no_file or getattr(node, "whole", False), text


def test_every_public_name_is_there():
    for name in layerwave.__all__:
        assert getattr(layerwave, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = layerwave.no_such_name


IMPORT = """
import json, os, sys
import jax
environment, flags = dict(os.environ), dict(jax.config.values)
import layerwave
from layerwave import kernels, targets, calibration, selection, interop, cli
print(json.dumps({
    "environment": dict(os.environ) == environment,
    "flags": dict(jax.config.values) == flags,
    "heavy": sorted({"torch", "transformers", "matplotlib", "scipy.signal"} & set(sys.modules)),
}))
"""


def test_importing_changes_nothing():
    """No torch, no environment variable, no global JAX flag; and what is slow to import waits until it is used."""
    output = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    assert json.loads(output.stdout) == {"environment": True, "flags": True, "heavy": []}
    assert output.stderr == ""


def test_importing_the_package_loads_no_room():
    code = "import sys, layerwave; print([m for m in sys.modules if m.startswith(('layerwave.', 'jax', 'flax'))])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "['layerwave.errors']"
