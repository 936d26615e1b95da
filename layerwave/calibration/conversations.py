"""Reads conversations: ShareGPT and OpenAI chats, plain texts, as JSON or JSON lines."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwave.errors import LayerwaveError

ROLES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "claude", "model", "bot", "function_call"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "function_response", "observation"),
}
"""Names that files use for the four roles of chat templates."""

_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
_FORMS = '{"conversations": [...]}, {"messages": [...]} or {"text": "..."}'


@dataclass(frozen=True)
class Turn:
    """One message; `role` is one of `ROLES`."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """A chat, or a plain text (then `turns` is empty); `where` names its place in the file for messages."""

    turns: tuple[Turn, ...]
    text: str
    where: str


@dataclass(frozen=True)
class Conversations(Sequence[Conversation]):
    """Usable conversations in the order of the file, and the number of rows without a word in them."""

    rows: tuple[Conversation, ...]
    unusable: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def read_conversations(
    source: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Conversations,
) -> Conversations:
    """Reads a file, or a list of its rows, into one form.

    A row is `{"conversations": [...]}` or `{"messages": [...]}`, whose turns have `from`/`value` or
    `role`/`content`, or `{"text": "..."}`. A file holds one JSON array of rows, one row a line, or a single row
    over several lines; its content decides, not the suffix. Lines end with LF, CR LF or CR. Rows without a word
    in them are left out and counted in `unusable`.

    Raises:
        LayerwaveError: a file that cannot be read, is empty, not UTF-8 or not JSON (line number), or nested too
            deeply, a row of unknown form, role or key (line or row number), or no usable conversation at all.
    """
    return _read(source, _conversation)


def read_prompts(
    source: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Conversations,
) -> Conversations:
    """Reads what is asked: rows as `read_conversations` takes, `{"turns": ["...", ...]}` or `{"prompt": "..."}`.

    Each text of `turns` (Spec-Bench, MT-Bench) and `prompt` becomes a user's turn. Raises as `read_conversations`.
    """
    return _read(source, _prompt)


def _read(source: Any, parse: Callable[[Any, str], Conversation | None]) -> Conversations:
    if isinstance(source, Conversations):
        return source
    if isinstance(source, str | os.PathLike):
        name, rows = str(source), list(rows_of_file(Path(source)))
    else:
        name, rows = "the list", [(f"row {number}", row) for number, row in enumerate(source, 1)]
    conversations = [parse(row, where) for where, row in rows]
    usable = tuple(conversation for conversation in conversations if conversation is not None)
    if not usable:
        raise LayerwaveError(
            f"{name} holds no usable conversation ({len(rows)} rows, none with a word in it): give rows like {_FORMS}"
        )
    return Conversations(usable, len(rows) - len(usable))


def rows_of_file(path: Path, forms: str = _FORMS) -> Iterator[tuple[str, Any]]:
    """Rows of a JSON array or of JSON lines, each with its place; `forms` says in errors what they may look like."""
    try:
        content = path.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")  # no JSON string holds a raw CR
    except OSError as error:
        raise LayerwaveError(f"cannot read {path} ({error.strerror}): name a JSON or JSON lines file") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise LayerwaveError(
            f"{path}, line {line}: not UTF-8 (byte {content[error.start]:#04x}): save the file as UTF-8"
        ) from error
    if not text.strip():
        raise LayerwaveError(f"{path} is empty: give rows like {forms}")
    if text.lstrip().startswith("["):
        for number, row in enumerate(_parse(text, path, 1), 1):
            yield f"{path}, row {number}", row
        return
    # Not splitlines: a string may hold U+2028.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not _is_json(lines[0][1]):  # one object over several lines, or a fault, which the whole text places best
        yield f"{path}, line {lines[0][0]}", _parse(text, path, 1)
        return
    for number, line in lines:
        yield f"{path}, line {number}", _parse(line, path, number)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _parse(text: str, path: Path, first_line: int) -> Any:
    """The JSON value that `text`, which starts on `first_line` of the file, holds."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LayerwaveError(
            f"{path}, line {first_line + error.lineno - 1}: malformed JSON ({error.msg} at column "
            f"{error.colno}): give one JSON array of rows, or one JSON object a line"
        ) from error
    except (RecursionError, ValueError) as error:  # Python's own limits; they come without a place
        fault = "nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"
        raise LayerwaveError(f"{path}, from line {first_line} on: {fault}: remove what is no conversation") from error


def _conversation(row: Any, where: str) -> Conversation | None:
    """One row in the common form, or None when there is not a word in it."""
    if not isinstance(row, Mapping):
        raise LayerwaveError(f"{where}: a {type(row).__name__}, but must be an object: give rows like {_FORMS}")
    for key in ("conversations", "messages"):
        if key in row:
            turns = row[key]
            if not isinstance(turns, Sequence) or isinstance(turns, str):
                raise LayerwaveError(f"{where}: {key} is not a list: give a list of turns")
            turns = tuple(_turn(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, 1))
            return Conversation(turns, "", where) if any(t.content.strip() for t in turns) else None
    if "text" in row:
        text = _words(row["text"], where, "text")
        return Conversation((), text, where) if text.strip() else None
    raise LayerwaveError(f"{where}: has the keys {sorted(map(str, row))}, but must look like {_FORMS}: rename them")


def _prompt(row: Any, where: str) -> Conversation | None:
    """As `_conversation`, for rows of bare questions too."""
    questions = None
    if isinstance(row, Mapping) and not row.keys() & {"conversations", "messages"}:
        questions = [row["prompt"]] if "prompt" in row else row.get("turns")
    if not isinstance(questions, list):
        return _conversation(row, where)
    return _conversation({"messages": [{"role": "user", "content": question} for question in questions]}, where)


def _turn(turn: Any, where: str) -> Turn:
    if not isinstance(turn, Mapping):
        raise LayerwaveError(f"{where}: a {type(turn).__name__}, but must be an object with a role and content")
    role_key, content_key = ("from", "value") if "from" in turn else ("role", "content")
    for key in (role_key, content_key):
        if key not in turn:
            raise LayerwaveError(
                f"{where}: lacks {key!r} (it has {sorted(map(str, turn))}): give from/value or role/content"
            )
    role = _ROLE_OF.get(str(turn[role_key]).strip().lower())
    if role is None:
        raise LayerwaveError(
            f"{where}: unknown role {turn[role_key]!r}, expected one of {', '.join(_ROLE_OF)}: rename it"
        )
    return Turn(role, _words(turn[content_key], where, content_key))


def _words(content: Any, where: str, key: str) -> str:
    """Text of a turn: a string, OpenAI's list of text parts, or null (a turn that only calls tools)."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        content = "".join(_words(part["text"], where, key) for part in content)
    if not isinstance(content, str):
        raise LayerwaveError(f"{where}: {key} is not text: give a string")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise LayerwaveError(f"{where}: {key} holds half a surrogate pair (an emoji cut in two): remove it") from error
    return content
