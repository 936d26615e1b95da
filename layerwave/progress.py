"""Progress on stderr: a bar on a terminal, a line every tenth elsewhere."""

import sys
import time


class Progress:
    """Context manager; call it with (samples done, samples in all, tokens done)."""

    def __init__(self, title: str):
        self.title = title
        self.started = time.monotonic()
        self.bar = None
        self.tenths = 0

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
        text = f"{done}/{total} samples, {tokens:,} tokens, {rate:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total, done=text)
        elif 10 * done // total > self.tenths:
            self.tenths = 10 * done // total
            print(f"{self.title}: {text}", file=sys.stderr, flush=True)

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()
