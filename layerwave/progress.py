"""Progress on stderr: a bar on a terminal, a line every tenth elsewhere."""

import sys
import time


class Progress:
    """Context manager; call it with (samples done, samples in all, tokens done), or `sets` with (done, in all)."""

    def __init__(self, title: str):
        self.title = title
        self.started = time.monotonic()
        self.bar = None
        self.tenths = 0
        self.first: int | None = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"))
            self.bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task(self.title, total=None, done="compiling")
            self.bar.start()
        else:
            print(f"{self.title} …", file=sys.stderr, flush=True)
        return self

    def __call__(self, done: int, total: int, tokens: int) -> None:
        rate = tokens / (time.monotonic() - self.started)
        self.show(done, total, f"{done}/{total} samples, {tokens:,} tokens, {rate:,.0f} tokens/s")

    def steps(self, done: int, total: int, tokens: int) -> None:
        """The same for steps of training, of which a resumed run has some behind it; with the minutes left."""
        elapsed = time.monotonic() - self.started
        self.first = done - 1 if self.first is None else self.first
        left = elapsed * (total - done) / (done - self.first) / 60
        speed = f"{tokens:,} tokens, {tokens / elapsed:,.0f} tokens/s, {left:,.0f} min left"
        self.show(done, total, f"{done}/{total} steps, {speed}")

    def sets(self, done: int, about: int) -> None:
        """The same for layer sets, whose number is an estimate."""
        self.show(done, about, f"{done} of about {about} layer sets")

    def show(self, done: int, total: int, text: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total, done=text)
        elif 10 * done // total > self.tenths:
            self.tenths = 10 * done // total
            print(f"{self.title}: {text}", file=sys.stderr, flush=True)

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()
