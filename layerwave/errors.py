"""The one error a user of layerwave has to catch."""

_LONGEST = 4000


class LayerwaveError(Exception):
    """Something the user gave cannot be used.

    The message is one line that names what was got, what was expected, and the remedy. The command line prints it
    and exits with code 2.
    """


def one_line(error: BaseException) -> str:
    """An error's message for a terminal: what it quotes from files neither breaks the line, nor steers the terminal,
    nor fills the screen."""
    text = " ".join(str(error).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text) - _LONGEST:,} characters more)"
