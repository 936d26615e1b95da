"""`layerwave calibrate` and `layerwave merge`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from layerwave.calibration.settings import CalibrationSettings
from layerwave.commands.given import GivenFiles
from layerwave.commands.jobs import run_jobs
from layerwave.commands.loading import load_planned
from layerwave.commands.printing import Json, check_out, print_json, progress_bar
from layerwave.errors import LayerwaveError
from layerwave.files.lock import only_run
from layerwave.interruption import deaf
from layerwave.targets import DTypeName

_OF_A_TARGET = ("dtype", "batch_tokens", "mesh", "processes")
"""Options that say how a target is run."""


@dataclass(frozen=True)
class DistributedSettings:
    """Several processes, each on its own devices, that see one folder; the same command for all."""

    distributed: FlagCreatePairsOff[bool] = False
    """Share the conversations with the other processes of a job. On TPU pod slices, Slurm and Open MPI they find each
    other; elsewhere pass the next three. Start the same job again to go on where it stopped."""
    coordinator: str | None = None
    """HOST:PORT of process 0."""
    processes: int | None = None
    """How many there are."""
    process: int | None = None
    """Which of them this is, from 0 on."""
    shard_batches: int = 16
    """Batches in a shard of work, which is what is lost of each process when a job stops. Of each shard a part of the
    size of all sums is written."""
    heartbeat_seconds: int = 60
    """A process that has given no sign of life for so long ends the job."""

    def __post_init__(self) -> None:
        given = [name for name in ("coordinator", "processes", "process") if getattr(self, name) is not None]
        if given and not self.distributed:
            raise LayerwaveError(f"{', '.join(given)} given for one process alone: add --distributed, or leave it out")


@dataclass(frozen=True)
class Calibrate:
    """Run a target over conversations once and keep the block sums of every layer in one file."""

    target: Annotated[Positional[str | None], arg(metavar="TARGET")] = None
    """Directory in Hugging Face format, hub id, or mini (the bundled model)."""
    conversations: Annotated[Positional[Path | None], arg(metavar="CONVERSATIONS")] = None
    """ShareGPT JSON or JSONL, OpenAI-style messages, or lines of {"text": ...}."""
    out: Path | None = None
    """The .safetensors file to write."""
    jobs: Path | None = None
    """In place of all else: a YAML list of rows with target, conversations, out, and settings by their names. Rows that
    are done are skipped, and one that fails does not keep the others from running."""
    given: OmitArgPrefixes[GivenFiles] = GivenFiles()
    settings: OmitArgPrefixes[CalibrationSettings] = CalibrationSettings()
    dtype: DTypeName = "float32"
    """Parameters and activations; norms, softmax and sums are float32 in any case."""
    batch_tokens: int | None = None
    """Tokens in a batch, padding included: memory and speed, not the result. By default 2,048 for each share of the
    mesh, or fewer where they do not fit."""
    mesh: str | None = None
    """Devices of this process, as in data=4,model=2: shares of a batch, and devices that share the parameters. By
    default all on data."""
    processes: OmitArgPrefixes[DistributedSettings] = DistributedSettings()
    json: Json = False

    def run(self) -> None:
        if self.jobs is not None:
            self._check_jobs()
            run_jobs(self.jobs, self.json)
            return
        self._check()
        check_out(self.out, *(self.given.states or [self.conversations]))
        if self.processes.distributed:
            calibration = self._shared()
        else:
            with only_run(self.out):
                calibration = self._alone()
                calibration.save(self.out)
        if calibration is not None:  # in one of the processes
            print_written(calibration, self.out, self.json)

    def _alone(self):
        from layerwave.calibration import calibrate, read_conversations

        if self.given.states:
            return self.given.calibrate(self.settings)
        conversations = read_conversations(self.conversations)
        target, batch_tokens = load_planned(self.target, self.dtype, self.settings, self.mesh, self.batch_tokens)
        with progress_bar(f"calibrating {self.target}") as progress:
            return calibrate(target, conversations, self.settings, batch_tokens=batch_tokens, progress=progress)

    def _shared(self):
        """By the processes of a job, of which one gets the calibration."""
        from layerwave.calibration import read_conversations
        from layerwave.calibration.distributed import calibrate_distributed, join, leaving
        from layerwave.calibration.plan import SHARE_TOKENS
        from layerwave.calibration.stream import Work
        from layerwave.targets import make_mesh
        from layerwave.targets.mesh import shares

        conversations = read_conversations(self.conversations)
        options, batch_tokens = self.processes, self.batch_tokens
        with deaf():
            processes = join(options.coordinator, options.processes, options.process, options.heartbeat_seconds)
        with leaving():
            if batch_tokens is None:  # not what is free here: all processes cut the same batches
                batch_tokens = shares(make_mesh(self.mesh)) * SHARE_TOKENS
            target, batch_tokens = load_planned(self.target, self.dtype, self.settings, self.mesh, batch_tokens)
            with progress_bar(f"calibrating {self.target}") as progress:
                work = Work.prepare(target, conversations, self.settings, batch_tokens)
                return calibrate_distributed(
                    work, self.out, processes, shard_batches=options.shard_batches, progress=progress
                )

    def _check_jobs(self) -> None:
        if replace(self, jobs=None, json=False) != Calibrate():
            raise LayerwaveError("--jobs with other options, which its rows would not see: write them into the rows")

    def _check(self) -> None:
        """One source, and a place for what comes out of it."""
        if not self.given.states and self.given != GivenFiles():
            raise LayerwaveError("options that describe given states, but no --states: name the files with --states")
        plain = Calibrate()
        if self.given.states and any(getattr(self, name) != getattr(plain, name) for name in _OF_A_TARGET):
            raise LayerwaveError(f"--states with options of a target ({', '.join(_OF_A_TARGET)}): leave them out")
        if (self.target, self.conversations).count(None) != (2 if self.given.states else 0):
            raise LayerwaveError("give TARGET and CONVERSATIONS, or --states or --jobs in their place")
        if self.out is None:
            raise LayerwaveError("nowhere to write the calibration: give --out")


@dataclass(frozen=True)
class Merge:
    """Join calibrations of disjoint conversations, made with the same target and settings."""

    parts: Annotated[Positional[tuple[Path, ...]], arg(metavar="CALIBRATION ...")]
    """Two or more files that `layerwave calibrate` wrote."""
    out: Path
    """The .safetensors file to write."""
    without_replicates: FlagCreatePairsOff[bool] = False
    """Leave out the bootstrap replicates, whose sums have to be in every part to be merged."""
    json: Json = False

    def run(self) -> None:
        from layerwave.calibration import Calibration

        check_out(self.out, *self.parts)
        if len(self.parts) < 2:
            raise LayerwaveError(f"{len(self.parts)} calibration to merge: name at least two")
        parts = [Calibration.load(part) for part in self.parts]
        if self.without_replicates:
            parts = [part.without_replicates() for part in parts]
        calibration = Calibration.merge(parts)
        calibration.save(self.out)
        print_written(calibration, self.out, self.json)


def print_written(calibration, out: Path, as_json: bool) -> None:
    if as_json:
        made = {"checks": calibration.checks, "warnings": calibration.warnings}
        print_json({"out": str(out), **calibration.summary, **made})
        return
    print_summary(calibration)
    print(f"wrote {out}")


def print_summary(calibration) -> None:
    print(f"{calibration!r}")
    print("; ".join(f"{count:,} {what}" for what, count in calibration.summary.items() if count))
