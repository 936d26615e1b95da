"""What an evaluation counted, question by question, and its file."""

import json
import math
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from layerwave.decoding.sampling import GenerationSettings
from layerwave.decoding.tree import TreeSettings
from layerwave.errors import LayerwaveError
from layerwave.files.reading import read_json, shown, typed
from layerwave.files.writing import whole_file

SCHEMA, VERSION = "layerwave.evaluation", 1


@dataclass(frozen=True)
class EvaluationSettings:
    """How drafts are evaluated: each with every tree, at every temperature.

    Raises `LayerwaveError` for values out of range, and for lists that are empty or name something twice.
    """

    nodes: tuple[int, ...] = (30, 60)
    """Sizes of the draft trees, the root included, see `TreeSettings`."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int = 1024
    """Tokens of an answer at most."""
    batch: int = 1
    """Questions answered together. Speed-ups are usually stated for one."""
    seed: int = 0
    """Of the samples. Each question has a stream of its own, the same for all drafts and for plain decoding."""
    samples_per_category: int | None = None
    """Ask only the first questions of each category; None: all."""
    depth: int = 8
    """Of the trees, see `TreeSettings`."""
    top_k: int = 10
    """Of the trees, see `TreeSettings`; 1 makes chains, whose nodes are depth + 1."""

    def __post_init__(self) -> None:
        for name in ("nodes", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise LayerwaveError(f"{name} are {list(values)}, expected at least one, each once")
        for temperature in self.temperatures:
            GenerationSettings(self.max_new_tokens, temperature)
        _ = self.trees
        if self.batch < 1:
            raise LayerwaveError(f"batch is {self.batch}, expected at least 1")
        if not 0 <= self.seed < 2**32:
            raise LayerwaveError(f"seed is {self.seed}, expected a whole number from 0 to {2**32 - 1}")
        if self.samples_per_category is not None and self.samples_per_category < 1:
            raise LayerwaveError(
                f"samples_per_category is {self.samples_per_category}, expected at least 1, or None for all"
            )

    @property
    def trees(self) -> tuple[TreeSettings, ...]:
        return tuple(TreeSettings(nodes, self.depth, self.top_k) for nodes in self.nodes)


@dataclass(frozen=True)
class Row:
    """One question in one run, all its turns together."""

    tokens: int
    """Of the answers, end tokens included."""
    emitted: int
    """Of these, those made in verification rounds: all but the first of each answer. Bonus tokens count."""
    accepted: tuple[int, ...]
    """Numbers of rounds in which 0, 1, … drafted tokens were kept."""
    drafted: int
    """Tokens proposed in all rounds."""
    seconds: float
    """Wall clock, compilation excluded; a batch's time is shared equally among its questions."""
    stops: dict[str, int]
    """Numbers of answers by why they ended: `end_token`, `max_new_tokens`, `context`."""
    empty: int
    """Answers of nothing but an end token."""
    differing: tuple[tuple[int, int], ...]
    """(turn, place in the answer, from 0) where an answer first differs from plain decoding's."""
    ended: str
    """Why later turns, or all, were not asked; or nothing."""

    @property
    def rounds(self) -> int:
        return sum(self.accepted)

    @property
    def kept(self) -> int:
        """Drafted tokens that were kept."""
        return sum(count * depth for depth, count in enumerate(self.accepted))

    def __post_init__(self) -> None:
        numbers = (self.tokens, self.emitted, *self.accepted, self.drafted, self.empty, *self.stops.values(),
                   *(number for pair in self.differing for number in pair))  # fmt: skip
        if any(number < 0 for number in numbers) or not 0 <= self.seconds < math.inf:
            raise LayerwaveError("a row of an evaluation counts below 0, or takes no finite time")


@dataclass(frozen=True)
class Run:
    """All questions at one temperature with one draft and tree, or plainly (draft and nodes are None)."""

    draft: str | None
    nodes: int | None
    temperature: float
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class EvaluatedDraft:
    """A draft as the file names it; `fingerprint` is a digest of its configuration and tensors."""

    name: str
    layers: tuple[int, ...]
    fingerprint: str


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Rows of all runs. Statistics: `summarize`.

    ids, categories: of the questions, in the order of every run's rows; questions: digest of what was asked.
    runs: at each temperature first plain decoding, then each draft with each tree.
    """

    target: str
    target_fingerprint: str
    dtype: str
    device: str
    drafts: tuple[EvaluatedDraft, ...]
    settings: EvaluationSettings
    questions: str
    ids: tuple[int | str, ...]
    categories: tuple[str, ...]
    runs: tuple[Run, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Evaluation({len(self.drafts)} drafts of {self.target}, {len(self.ids)} questions, nodes "
            f"{self.settings.nodes}, temperatures {self.settings.temperatures})"
        )

    @property
    def header(self) -> dict[str, Any]:
        """All but the runs, as JSON gives it back: two evaluations with equal ones count the same things."""
        fields = {name: value for name, value in vars(self).items() if name not in ("runs", "settings")}
        fields |= {"drafts": [asdict(draft) for draft in self.drafts]}
        return json.loads(json.dumps({"schema": SCHEMA, "version": VERSION, **fields, **asdict(self.settings)}))

    def plain(self, temperature: float) -> Run:
        """Plain decoding at a temperature of the settings."""
        return next(run for run in self.runs if run.draft is None and run.temperature == temperature)

    def save(self, path: str | Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            LayerwaveError: it cannot be written.
        """
        head, tail = json.dumps({**self.header, "runs": []}, indent=1).rsplit("[]", 1)
        runs = ",\n".join(_text(run) for run in self.runs)
        with whole_file(path) as partial:
            partial.write_text(f"{head}[\n{runs}\n]{tail}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Evaluation":
        """Reads a file that `save` wrote.

        Raises:
            LayerwaveError: it cannot be read, is something else or damaged, or has another version.
        """
        return cls.from_record(read_json(path, "give a file of `layerwave evaluate`"), str(path))

    @property
    def record(self) -> dict[str, Any]:
        """What the file holds, as JSON can say it."""
        return self.header | {"runs": [asdict(run) for run in self.runs]}

    @classmethod
    def from_record(cls, content: Any, path: str) -> "Evaluation":
        """The evaluation of a `record` that was read from the file `path`; raises as `load` does."""
        content = dict(content) if isinstance(content, dict) else {}
        if content.pop("schema", None) != SCHEMA:
            raise LayerwaveError(f"{path} is not an evaluation: give a file that `layerwave evaluate` wrote")
        if (version := content.pop("version", None)) != VERSION:
            raise LayerwaveError(
                f"{path} has schema version {shown(version)}, this layerwave reads {VERSION}: evaluate again"
            )
        names = EvaluationSettings.__dataclass_fields__
        settings = {name: content.pop(name) for name in names if name in content}
        try:
            if missing := sorted(names.keys() - settings.keys()):
                raise LayerwaveError(f"it lacks {missing}")
            found = typed(cls, {**content, "settings": settings}, "evaluation")
        except LayerwaveError as error:
            raise LayerwaveError(f"{path} is damaged ({error}): evaluate again") from None
        trees = [(None, None), *product([draft.name for draft in found.drafts], found.settings.nodes)]
        wanted = [(*tree, temperature) for temperature in found.settings.temperatures for tree in trees]
        if [(run.draft, run.nodes, run.temperature) for run in found.runs] != wanted:
            raise LayerwaveError(
                f"{path} is damaged (it lacks runs, or has others than its header names): evaluate again"
            )
        if any(len(run.rows) != len(found.ids) for run in found.runs) or len(found.ids) != len(found.categories):
            raise LayerwaveError(f"{path} is damaged (it lacks runs, or runs lack questions): evaluate again")
        return found


def _text(run: Run) -> str:
    """A run as JSON, one row a line."""
    head = json.dumps({name: value for name, value in vars(run).items() if name != "rows"})
    return head[:-1] + ', "rows": [\n' + ",\n".join(json.dumps(asdict(row)) for row in run.rows) + "\n]}"
