"""`layerwave calibrate --jobs`: many calibrations from one file, one after the other in one process."""

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from layerwave.calibration.settings import CalibrationSettings
from layerwave.commands.loading import load_planned
from layerwave.commands.printing import check_out, print_json, print_table, progress_bar, table_of
from layerwave.errors import LayerwaveError
from layerwave.files.lock import only_run
from layerwave.files.reading import shown
from layerwave.interruption import received
from layerwave.targets import DTypeName

_SETTINGS = {field.name: field.default for field in fields(CalibrationSettings)}
_REQUIRED = ("target", "conversations", "out")
_OPTIONAL = ("dtype", "batch_tokens", "mesh")
_MOST_KEYS, _DEEPEST = 1000, 20


@dataclass(frozen=True)
class Job:
    """One row: a target, its data, the settings, and the file that they make."""

    target: str
    conversations: Path
    out: Path
    settings: CalibrationSettings = CalibrationSettings()
    dtype: DTypeName = "float32"
    batch_tokens: int | None = None
    mesh: str | None = None

    def is_done(self) -> bool:
        """Whether `out` is the calibration that this row would make: of the same settings, target, dtype and samples.

        Of `out` only the header is read, and of the target no parameters: its fingerprint (see `load_target`), its
        number of positions, and its tokenizer, which makes the samples' fingerprints of the conversations anew.
        """
        from layerwave.calibration import read_conversations
        from layerwave.calibration.artifact import data_fingerprint
        from layerwave.calibration.storage import read_header
        from layerwave.calibration.tokens import draw_samples
        from layerwave.targets.target import identify

        try:
            found, header = read_header(self.out)
        except LayerwaveError:  # nothing there, or a calibration of another format version, which is made again
            return False
        config, tokenizer, fingerprint = identify(self.target)
        settings = replace(self.settings, max_length=min(self.settings.max_length, config.max_positions))
        if (found, header["target_fingerprint"], header["target_dtype"]) != (settings, fingerprint, self.dtype):
            return False
        samples = draw_samples(tokenizer, config.vocab_size, read_conversations(self.conversations), settings)
        return header["data_fingerprint"] == data_fingerprint(samples.fingerprints)

    def run(self, progress: Callable[[int, int, int], None] | None = None) -> int:
        """Makes `out`; returns the number of samples. The target is gone when it returns."""
        from layerwave.calibration import calibrate, read_conversations

        conversations = read_conversations(self.conversations)
        target, batch_tokens = load_planned(self.target, self.dtype, self.settings, self.mesh, self.batch_tokens)
        calibration = calibrate(target, conversations, self.settings, batch_tokens=batch_tokens, progress=progress)
        calibration.save(self.out)
        return len(calibration.lengths)


@dataclass(frozen=True)
class Outcome:
    """What became of a row; `error` is the message of what failed."""

    target: str
    conversations: str
    out: str
    status: Literal["done", "skipped", "failed"]
    samples: int | None
    seconds: float
    error: str = ""


def run_jobs(path: Path, as_json: bool) -> None:
    """Runs the rows that are not done, goes on after failures, and prints a table of all.

    Raises:
        LayerwaveError: before the first row, for a file with faults (all are listed); after the last, if any failed.
    """
    jobs = read_jobs(path)
    outcomes = []
    for number, job in enumerate(jobs, 1):
        with progress_bar(f"{number}/{len(jobs)} {job.out}") as progress:
            outcomes.append(attempt(job, progress))
    if as_json:
        print_json([asdict(outcome) for outcome in outcomes])
    else:
        print_outcomes(outcomes)
    if failed := [outcome.out for outcome in outcomes if outcome.status == "failed"]:
        raise LayerwaveError(
            f"{len(failed)} of {len(jobs)} jobs failed ({', '.join(failed)}): mend what the table says and run "
            f"{path} again, which skips those that are done"
        )


def attempt(job: Job, progress: Callable[[int, int, int], None] | None = None) -> Outcome:
    """Runs a row that is not done. Whatever it raises ends the row and no other; nothing of it stays in memory."""
    started, samples, error = time.monotonic(), None, ""
    try:
        with only_run(job.out):
            status = "skipped" if job.is_done() else "done"
            if status == "done":
                samples = job.run(progress)
    except Exception as raised:
        if received():  # wrapped on its way here: the user ends all rows
            raise
        status = "failed"
        error = str(raised) if isinstance(raised, LayerwaveError) else f"{type(raised).__name__}: {raised}"
    gc.collect()  # modules refer to themselves, so that a target would outlive its row
    seconds = round(time.monotonic() - started, 1)
    return Outcome(job.target, str(job.conversations), str(job.out), status, samples, seconds, error)


def print_outcomes(outcomes: list[Outcome]) -> None:
    table = table_of("target", "conversations", "out", "status", "samples", "seconds", "error")
    for outcome in outcomes:
        samples = "" if outcome.samples is None else str(outcome.samples)
        first_line = next(iter(outcome.error.splitlines()), "")
        table.add_row(
            outcome.target,
            outcome.conversations,
            outcome.out,
            outcome.status,
            samples,
            f"{outcome.seconds:.1f}",
            first_line,
        )
    print_table(table)


def read_jobs(path: Path) -> list[Job]:
    """The rows of a YAML file: a list of mappings with target, conversations and out, and settings by their names.

    Raises:
        LayerwaveError: one message that lists every fault of every row: unknown, missing and repeated keys, values of
            a wrong type or out of range, files that are missing or cannot be written, and an `out` named twice.
    """
    rows = _parse(path)
    faults = []
    jobs = []
    for number, row in enumerate(rows, 1):
        try:
            jobs.append(_job(row))
        except _RowError as error:
            faults += [f"row {number}: {fault}" for fault in error.args]
    named = (row["out"] for row in rows if isinstance(row, dict) and isinstance(row.get("out"), str))
    outs = Counter(map(_place, named))
    faults += [f"out {out} is named {times} times" for out, times in outs.items() if times > 1]
    if faults:
        raise LayerwaveError(f"{path} has {len(faults)} faults, and no row was run: {'; '.join(faults)}")
    return jobs


def _place(out: str) -> Path:
    """Where a row writes; of a name that no path can have, which is a fault of its row, the name."""
    try:
        return Path(out).resolve()
    except (OSError, ValueError, RuntimeError):
        return Path(out)


class _RowError(Exception):
    """All faults of one row."""


def _job(row: Any) -> Job:
    if not isinstance(row, dict):
        raise _RowError(f"a {type(row).__name__}, but must be a mapping with {', '.join(_REQUIRED)}")
    known = {*_REQUIRED, *_OPTIONAL, *_SETTINGS}
    faults = [f"unknown key {shown(key)}" for key in row if key not in known]
    faults += [f"lacks {key}" for key in _REQUIRED if key not in row]
    kinds = dict.fromkeys((*_REQUIRED, "dtype", "mesh"), "") | {"batch_tokens": 1} | _SETTINGS
    faults += [
        f"{key} is {shown(value)}, but must be of type {type(kinds[key]).__name__}"
        for key, value in row.items()
        if key in known and not _of_kind(value, kinds[key])
    ]
    if faults:
        raise _RowError(*faults)
    if row.get("dtype", "float32") not in get_args(DTypeName):
        faults.append(f"dtype is {shown(row['dtype'])}, but must be one of {', '.join(get_args(DTypeName))}")
    try:
        given = {key: value for key, value in row.items() if key in _SETTINGS}
        settings = CalibrationSettings(**{key: type(_SETTINGS[key])(value) for key, value in given.items()})
    except (LayerwaveError, OverflowError) as error:
        faults.append(str(error))
        settings = CalibrationSettings()
    paths = Path(row["conversations"]), Path(row["out"])
    try:
        faults += _unusable(row["target"], *paths, row.get("batch_tokens"))
    except (OSError, ValueError, RuntimeError) as error:  # names that no path can have, links in a circle
        faults.append(f"{shown(row['out'])} or {shown(row['conversations'])} cannot be a path ({error})")
    if faults:
        raise _RowError(*faults)
    return Job(row["target"], *paths, settings, **{key: row[key] for key in _OPTIONAL if key in row})


def _of_kind(value: Any, example: Any) -> bool:
    """Whether the value has the type of the example; a whole number is a number, but True is none."""
    if isinstance(example, bool) or isinstance(value, bool):
        return isinstance(example, bool) and isinstance(value, bool)
    return isinstance(value, int | float if isinstance(example, float) else type(example))


def _unusable(target: str, conversations: Path, out: Path, batch_tokens: int | None) -> list[str]:
    """Faults that only the machine can tell, and the range of what is no setting."""
    from layerwave.calibration.storage import is_calibration
    from layerwave.targets.target import check_name

    faults = []
    if batch_tokens is not None and batch_tokens < 1:
        faults.append(f"batch_tokens is {batch_tokens}, but must be >= 1")
    if not conversations.is_file():
        faults.append(f"no file {conversations}")
    for check in (lambda: check_name(target), lambda: check_out(out, conversations)):
        try:
            check()
        except LayerwaveError as error:
            faults.append(str(error))
    if out.resolve().is_file() and not is_calibration(out):
        faults.append(f"{out} is no calibration and would be lost")
    return faults


def _parse(path: Path) -> list:
    try:
        rows = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise LayerwaveError(f"cannot read {path} ({error.strerror}): name a YAML file of jobs") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # the latter of scalars and of depth
        raise LayerwaveError(f"{path} is no YAML ({' '.join(str(error).split())}): write a list of mappings") from None
    if not isinstance(rows, list) or not rows:
        raise LayerwaveError(f"{path} must be a list of jobs, each a mapping with {', '.join(_REQUIRED)}")
    return rows


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping; YAML would take the last without a word.

    And what takes time without bound: `<<` takes one mapping, of no more than `_MOST_KEYS`, in brackets not too deep.
    """

    def fetch_flow_collection_start(self, token):
        if self.flow_level >= _DEEPEST:  # the scanner's time grows with the square of the depth
            raise yaml.scanner.ScannerError(None, None, f"nested more than {_DEEPEST} deep", self.get_mark())
        super().fetch_flow_collection_start(token)

    def flatten_mapping(self, node):
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge" and not isinstance(value, yaml.MappingNode):
                raise yaml.constructor.ConstructorError(None, None, "<< takes one mapping", node.start_mark)
        super().flatten_mapping(node)
        if len(node.value) > _MOST_KEYS:
            raise yaml.constructor.ConstructorError(None, None, f"more than {_MOST_KEYS} keys", node.start_mark)

    def construct_mapping(self, node, deep=False):
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, times in keys.items():
            if times > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands {times} times", node.start_mark
                )
        return super().construct_mapping(node, deep)
