"""One calibration by several processes: shards of work on a shared folder, each committed whole, and merged in order.

A shard is some consecutive batches. How batches and shards are cut does not depend on the number of processes; process
k of n runs the shards k, k + n, … on its own devices. So neither does the result, and a job that was stopped goes on
with the shards that are missing, with as many processes as there are then.

JAX's coordination service tells the processes who they are, and ends them all when one has died. What a process fails
of while it lives, it leaves in the folder for the others.
"""

import hashlib
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from threading import Thread
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from layerwave.calibration.artifact import Calibration
from layerwave.calibration.stream import Progress, Work
from layerwave.errors import LayerwaveError
from layerwave.files.identity import require_same
from layerwave.files.lock import only_run
from layerwave.files.writing import cannot_write, make_folder, sweep, whole_file
from layerwave.interruption import received

START_SECONDS, POLL_SECONDS, LEAVE_SECONDS = 300, 0.5, 5


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is."""

    index: int
    number: int


def join(coordinator: str | None, number: int | None, index: int | None, heartbeat_seconds: int) -> Processes:
    """Meets the other processes of the job; call it before anything is computed.

    Args:
        coordinator: host and port of process 0. If it is None, like the other two, it comes from the launcher where
            JAX knows it: TPU pod slices, Slurm, Open MPI, Kubernetes.
        heartbeat_seconds: a process that gives no sign of life for so long has died, and the others end.

    Raises:
        LayerwaveError: no launcher and no numbers, numbers that do not fit, or not all processes came in time.
    """
    try:
        jax.distributed.initialize(
            coordinator,
            number,
            index,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=heartbeat_seconds,
        )
    except (ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise LayerwaveError(
            f"this process could not join the others ({reason}): start it with a launcher that JAX knows (TPU pod "
            "slice, Slurm, Open MPI), or pass --coordinator HOST:PORT --processes N --process K to each"
        ) from error
    return Processes(jax.process_index(), jax.process_count())


@contextmanager
def leaving() -> Iterator[None]:
    """Lets a process that a signal ended take leave of the others, for as long as it may take them to hear of it.

    They may be stuck where they do not; JAX itself would wait for them, and then abort the process.
    """
    try:
        yield
    finally:
        if received():
            farewell = Thread(target=jax.distributed.shutdown, daemon=True)
            farewell.start()
            farewell.join(LEAVE_SECONDS)


@contextmanager
def told(processes: Processes) -> Iterator[None]:
    """All processes leave this together; what process 0 fails of in it, all raise."""
    said, error = np.zeros(2048, np.uint8), None
    try:
        yield
    except LayerwaveError as found:
        text = np.frombuffer(str(found).encode()[: len(said)], np.uint8)
        said[: len(text)], error = text, found
    said = bytes(np.asarray(multihost_utils.broadcast_one_to_all(said))).rstrip(b"\0").decode(errors="ignore")
    if said:
        raise error or LayerwaveError(f"process 0 failed ({said})")


def calibrate_distributed(
    work: Work,
    out: Path,
    processes: Processes,
    *,
    shard_batches: int,
    progress: Progress | None = None,
) -> Calibration | None:
    """Runs this process's shards, or those of them that are not there yet; every process calls it.

    Parts lie in `OUT.parts`, which all processes must see, until process 0 has merged them and written `out`. One is
    of the size of all sums, and `shard_batches` batches go into it.

    Returns:
        The calibration in process 0, None in the others; in all of them when it is written.

    Raises:
        LayerwaveError: as `calibrate`; another job writes `out`; `OUT.parts` belongs to another calibration (what
            differs is named); or another process failed, which is named with its error.
    """
    if shard_batches < 1:
        raise LayerwaveError(f"shard_batches is {shard_batches}, but must be >= 1: pass another --shard-batches")
    job = Job(out.with_name(out.name + ".parts"), work, shard_batches)
    with ExitStack() as stack:
        with told(processes):  # the owner of the job is its first process
            if processes.index == 0:
                stack.enter_context(only_run(out))
                job.open()
        stack.enter_context(job.failing(processes.index))
        job.run(range(len(job.parts))[processes.index :: processes.number], progress)
        if processes.index:
            job.wait(lambda: not job.folder.exists())
            return None
        job.wait(lambda: all(part.exists() for part in job.parts))
        calibration = work.checked(job.merged())
        calibration.save(out)
        job.close()
        return calibration


@dataclass(frozen=True)
class Job:
    """The folder of the parts, and the shards of work that they are made of."""

    folder: Path
    work: Work
    shard_batches: int

    @cached_property
    def parts(self) -> list[Path]:
        """The file of every shard."""
        shards = math.ceil(len(self.work.plan) / self.shard_batches)
        return [self.folder / f"part-{shard:05}.safetensors" for shard in range(shards)]

    def open(self) -> None:
        """The folder is that of this job, and what an earlier run of it left of failures is gone."""
        make_folder(self.folder)
        require_same(self.folder / "job.json", "layerwave.parts", 1, self._identity)
        for path in self._failures():
            path.unlink()
        sweep(self.folder)

    def run(self, shards: Sequence[int], progress: Progress | None) -> None:
        """Computes and commits those of the shards that are not there."""
        missing = [shard for shard in shards if not self.parts[shard].exists()]
        batches = {shard: slice(shard * self.shard_batches, (shard + 1) * self.shard_batches) for shard in missing}
        total = sum(len(batch.samples) for part in batches.values() for batch in self.work.plan[part])
        before = np.zeros(2, int)  # samples and tokens

        def report(samples: int, _: int, tokens: int) -> None:
            self.require_no_failure()
            if progress is not None:
                progress(int(before[0]) + samples, total, int(before[1]) + tokens)

        # Sums are what merges; whether the whole keeps those of its replicates is decided at the end.
        work = replace(self.work, settings=replace(self.work.settings, replicate_megabytes=math.inf))
        for shard, part in batches.items():
            calibration = work.run(part, report)
            calibration.save(self.parts[shard])
            before += len(calibration.lengths), calibration.lengths.sum()

    def merged(self) -> Calibration:
        """All parts, one after the other: two are in memory at a time."""
        whole = reduce(lambda sum, part: Calibration.merge([sum, part]), map(Calibration.load, self.parts))
        settings, replicates = self.work.settings, whole.replicates
        if replicates is not None:
            replicates = replicates.limited(settings.replicate_megabytes)
        return replace(whole, settings=settings, replicates=replicates, tallies=self.work.tallies)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until the others have done their part. One that dies ends this process too (`join`)."""
        while not condition():
            self.require_no_failure()
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Removes the folder; it is gone for the others at one moment."""
        old = self.folder.with_suffix(".merged")
        shutil.rmtree(old, ignore_errors=True)  # of a job that was killed here
        try:
            self.folder.rename(old)
        except OSError as error:
            raise cannot_write(self.folder, error, "make the folder above it writable") from None
        shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def failing(self, process: int) -> Iterator[None]:
        """Leaves the error of this process in the folder, unless it is the answer to another's."""
        try:
            yield
        except BaseException as error:
            if self.folder.is_dir() and not self._failures():
                message = str(error) if isinstance(error, LayerwaveError) else repr(error)
                with suppress(LayerwaveError), whole_file(self._failure(process)) as partial:
                    partial.write_text(message, encoding="utf-8")
            raise

    def require_no_failure(self) -> None:
        for path in self._failures():
            process, message = path.stem.removeprefix("failed-"), path.read_text(encoding="utf-8")
            raise LayerwaveError(
                f"process {process} failed ({message}); mend it and start the job again: it goes on with "
                f"the {sum(part.exists() for part in self.parts)} of {len(self.parts)} parts in {self.folder}"
            )

    def _failure(self, process: int) -> Path:
        return self.folder / f"failed-{process}.txt"

    def _failures(self) -> list[Path]:
        return sorted(self.folder.glob("failed-*.txt"))

    @property
    def _identity(self) -> dict[str, Any]:
        """What has to be the same for a job to be gone on with."""
        target, shapes = self.work.target, Counter(batch.tokens.shape for batch in self.work.plan)
        return {
            "target fingerprint": target.fingerprint,
            "target dtype": str(target.decoder.dtype),
            "settings": asdict(self.work.settings),
            "data fingerprint": hashlib.sha256(self.work.samples.fingerprints.astype("<u8").tobytes()).hexdigest(),
            "batches": {f"{rows} x {width} tokens": number for (rows, width), number in shapes.items()},
            "shard_batches": self.shard_batches,
        }
