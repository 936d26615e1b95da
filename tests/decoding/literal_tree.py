"""EAGLE-2's dynamic tree, one node at a time, and the cases of `golden/trees.json`.

`python -m tests.decoding.literal_tree` in the project's root writes that file anew.
"""

import json
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np

from layerwave.decoding import TreeSettings

GOLDEN = Path(__file__).parent / "golden" / "trees.json"
SETTINGS = {
    "paper, 60": TreeSettings(60, 8, 10),
    "paper, 30": TreeSettings(30, 8, 10),
    "chain": TreeSettings(5, 4, 1),
    "star": TreeSettings(6, 1, 6),
    "all candidates": TreeSettings(13, 2, 3),
    "nodes end the depth": TreeSettings(3, 6, 2),
}
VOCABULARY = np.array([1, 2, 5, 7, 8, 11, 30, 31, 32, 40, 41, 63])
ROOT = 50
ROWS = 97


class Node(NamedTuple):
    score: np.float32
    token: int
    parent: int
    path: tuple[int, ...]


def literal_tree(log_q, vocabulary, root, settings):
    """tokens, parents, depths, scores of the chosen nodes.

    `log_q(path)`: the draft's log-probabilities behind a path of draft ids, which begins below the root.
    """
    made = [Node(np.float32(0), root, 0, ())]
    frontier = [0]
    for _ in range(settings.depth):
        first = len(made)
        for parent in frontier:
            row = log_q(made[parent].path)
            for child in sorted(range(len(row)), key=lambda i: (-row[i], i))[: settings.top_k]:
                score = np.float32(made[parent].score + row[child])
                made.append(Node(score, int(vocabulary[child]), parent, (*made[parent].path, child)))
        frontier = sorted(range(first, len(made)), key=lambda i: (-made[i].score, i))[: settings.top_k]
    chosen = sorted(sorted(range(len(made)), key=lambda i: (-made[i].score, i))[: settings.nodes])
    tokens, parents, depths, scores = [], [], [], []
    for i in chosen:
        tokens.append(made[i].token)
        parents.append(chosen.index(made[i].parent))  # fails for an orphan
        depths.append(0 if i == 0 else depths[parents[-1]] + 1)
        scores.append(float(made[i].score))
    return tokens, parents, depths, scores


def tree_of_table(table, settings):
    """The tree when the draft's log-probabilities behind a path are an arbitrary row of a table."""

    def log_q(path):
        return table[reduce(lambda code, draft_id: (code * 31 + draft_id + 1) % ROWS, path, 0)]

    return literal_tree(log_q, VOCABULARY, ROOT, settings)


def tables(seed):
    """Log-probabilities of what follows each path, in four kinds: plain, full of ties, certain, often impossible."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS, len(VOCABULARY))) * 2
    plain = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ties = rng.integers(-2, 0, logits.shape)
    certain = np.where(np.arange(len(VOCABULARY)) == rng.integers(0, len(VOCABULARY), (ROWS, 1)), 0.0, -np.inf)
    impossible = np.where(rng.random(logits.shape) < 0.8, -np.inf, ties)
    return {
        name: table.astype(np.float32)
        for name, table in {"plain": plain, "ties": ties, "certain": certain, "impossible": impossible}.items()
    }


def golden_trees():
    """All cases: settings and kind of table -> the tree, impossible nodes with the score None."""
    found = {}
    for name, settings in SETTINGS.items():
        for kind, table in tables(seed=7).items():
            tokens, parents, depths, scores = tree_of_table(table, settings)
            scores = [None if np.isinf(score) else round(score, 5) for score in scores]
            found[f"{name}: {kind}"] = {"tokens": tokens, "parents": parents, "depths": depths, "scores": scores}
    return found


if __name__ == "__main__":
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(tree)}" for name, tree in golden_trees().items())
    GOLDEN.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
