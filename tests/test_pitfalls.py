"""PITFALLS.md names tests that there are, and leaves no item without one or a reason."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "tests" / "PITFALLS.md").read_text(encoding="utf-8")
ITEMS = dict(re.findall(r"^- \*\*([BE]\d+)\*\* (.*)$", TEXT, re.MULTILINE))


def test_every_item_stands_once_with_a_test_or_a_reason():
    assert [*ITEMS] == [f"B{i}" for i in range(1, 43)] + [f"E{i}" for i in range(1, 48)]
    assert len(re.findall(r"^- \*\*", TEXT, re.MULTILINE)) == len(ITEMS)
    without = [name for name, text in ITEMS.items() if "::test_" not in text and "Not tested" not in text]
    assert not without


def test_every_test_named_exists():
    named = re.findall(r"`([^`]+)::(\w+)`", TEXT)
    assert len(named) > 80
    functions: dict[str, set[str]] = {}
    for path, _ in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not [f"{path}::{test}" for path, test in named if test not in functions[path]]
