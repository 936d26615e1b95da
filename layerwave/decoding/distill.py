"""Training conversations in the target's own words: it answers the questions of a file, in one resumable run.

A draft learns to guess what its target says, so the answers of a data set are replaced by the target's. Conversations
are answered in batches. Each finished batch is appended to a journal beside the output, and when all are done, the
output is written in the order of the questions. A killed run goes on with the first batch that the journal lacks; since
batches depend on questions and settings alone, it ends in the same bytes.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from layerwave.calibration.conversations import Conversation, Conversations, Turn, read_prompts
from layerwave.calibration.tokens import TemplateRefusalError, encode, warn_of_today
from layerwave.decoding.generate import generate
from layerwave.decoding.sampling import GenerationSettings
from layerwave.drafts.contamination import Hit, decontaminate
from layerwave.errors import LayerwaveError
from layerwave.files import whole_file
from layerwave.targets import Target
from layerwave.targets.target import MINI, MINI_FOLDER

Progress = Callable[[int, int, int], None]
"""Called with (conversations done, conversations in all, tokens made)."""
REFUSED = "rows ended by the chat template"
FULL = "rows ended for want of positions"


@dataclass(frozen=True)
class DistillSettings:
    """How the target answers. Raises `LayerwaveError` for values out of range."""

    max_new_tokens: int = 1024
    """Tokens of an answer at most; one that reaches them is flagged."""
    temperature: float = 0.0
    """0 is greedy; greater values sample from the distribution sharpened or flattened by it."""
    seed: int = 0
    """Of the samples. Each conversation has a stream of its own, whatever else the file holds."""
    batch: int = 16
    """Conversations answered together: speed and memory."""

    def __post_init__(self) -> None:
        GenerationSettings(self.max_new_tokens, self.temperature)
        if self.batch < 1:
            raise LayerwaveError(f"batch is {self.batch}, expected at least 1")
        if not 0 <= self.seed < 2**32:
            raise LayerwaveError(f"seed is {self.seed}, expected a whole number from 0 to {2**32 - 1}")


@dataclass(frozen=True)
class Distilled:
    """Numbers of rows, answers and tokens by what became of them; the prompts left out for the evaluation's sake."""

    tallies: dict[str, int]
    contaminated: tuple[Hit, ...]


@dataclass(frozen=True)
class _Prompt:
    """The questions of one conversation, each after the system turns before it.

    name: hexadecimal digest of them, and of a number where a file asks the same several times.
    """

    questions: tuple[tuple[Turn, ...], ...]
    where: str
    name: str


def distill(
    target: Target,
    prompts: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Conversations,
    out: str | os.PathLike[str],
    settings: DistillSettings | None = None,
    *,
    evaluation: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Distilled:
    """Lets the target answer every user's turn, its own earlier answers in view, and writes the conversations.

    A line of `out` is `{"id", "conversations": [{"role", "content"}, ...], "truncated"}`, which calibration, training
    and SpecForge read; `truncated` counts answers that reached `max_new_tokens`. Beside it, `OUT.run.json` says how it
    was made, and while the run lasts `OUT.partial` is its journal. A finished run is not repeated.

    System turns stay, answers of others do not; rows with a tool's turn are left out. A conversation ends early where
    the template refuses a turn, or the target has no positions left for it and an answer.

    Args:
        prompts: what `read_prompts` reads, or returned.
        evaluation: a file of questions; prompts that share text with it are left out, see `decontaminate`.
        progress: called after each batch.

    Raises:
        LayerwaveError: unusable prompts, no chat template, a target without end tokens or with one outside its
            vocabulary, an output or a journal of another run, a damaged journal, or no answer at all.
    """
    settings = settings or DistillSettings()
    read = read_prompts(prompts)
    conversations, hits = (read, ()) if evaluation is None else decontaminate(read, evaluation)
    asked, unfit = _prompts(conversations)
    left_out = {
        "rows": len(read) + read.unusable,
        "rows without a word": read.unusable,
        "rows that share text with the evaluation": len(hits),
        **unfit,
    }
    if not asked:
        raise LayerwaveError(f"nothing to ask ({listed(left_out)}): give rows with a user's turn")
    warn_of_today(target.tokenizer, conversations)
    generation = GenerationSettings(settings.max_new_tokens, settings.temperature, end_tokens(target))
    run = {
        "schema": "layerwave.distill",
        "version": 1,
        "target": target.fingerprint,
        "dtype": str(target.decoder.dtype),
        "end_tokens": list(generation.end_tokens),
        "prompts": hashlib.sha256("".join(prompt.name for prompt in asked).encode()).hexdigest(),
        **asdict(settings),
    }
    work = _Work(Path(out), run)
    made = work.finished()
    if made is None:
        plan = _plan(asked, settings.batch)
        batches = work.resume()
        done, tokens = sum(map(len, batches)), 0
        for batch in plan[len(batches) :]:
            batches.append(_answer(target, [asked[i] for i in batch], generation, settings))
            work.append(batches[-1])
            done, tokens = done + len(batch), tokens + sum(record["tokens"] for record in batches[-1])
            if progress is not None:
                progress(done, len(asked), tokens)
        records = dict(zip(chain(*plan), chain(*batches), strict=True))
        made = work.finish([records[i] for i in range(len(asked))])
    return Distilled({**left_out, **made}, hits)


def end_tokens(target: Target) -> tuple[int, ...]:
    """Tokens with which the target ends an answer: its tokenizer's, and those that generation_config.json names.

    Raises:
        LayerwaveError: there are none.
    """
    path = _generation_config(target.name)
    named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    own = target.tokenizer.eos_token_id
    found = {token for token in (own, *(named if isinstance(named, list) else [named])) if token is not None}
    if not found:
        raise LayerwaveError(f"{target.name} names no end token: put eos_token_id into generation_config.json")
    return tuple(sorted(found))


def _generation_config(name: str) -> Path:
    """Where the file lies beside the weights of the target of this name, if it has one."""
    folder, file = MINI_FOLDER if name == MINI else Path(name), "generation_config.json"
    if folder.is_dir():
        return folder / file
    from huggingface_hub import try_to_load_from_cache

    return Path(str(try_to_load_from_cache(name, file)))  # loading a hub id left it in the cache


def _prompts(conversations: Conversations) -> tuple[list[_Prompt], dict[str, int]]:
    """What to ask, and how many rows cannot be asked for which reason."""
    found: list[_Prompt] = []
    seen: Counter[str] = Counter()
    tools = mute = 0
    for conversation in conversations:
        if any(turn.role == "tool" for turn in conversation.turns):
            tools += 1
            continue
        questions: list[tuple[Turn, ...]] = []
        pending: list[Turn] = []
        for turn in conversation.turns:
            if turn.role != "assistant":
                pending.append(turn)
            if turn.role == "user":
                questions.append(tuple(pending))
                pending = []
        if not questions:
            mute += 1
            continue
        content = json.dumps([[turn.role, turn.content] for question in questions for turn in question])
        seen[content] += 1
        name = hashlib.sha256(f"{seen[content]} {content}".encode()).hexdigest()[:16]
        found.append(_Prompt(tuple(questions), conversation.where, name))
    return found, {"rows with a tool's turn": tools, "rows without a user's turn": mute}


def _plan(prompts: list[_Prompt], batch: int) -> list[list[int]]:
    """Indices of the prompts batch by batch: alike in turns and length, the longest first."""

    def size(i: int) -> tuple[int, int]:
        questions = prompts[i].questions
        return len(questions), sum(len(turn.content) for question in questions for turn in question)

    order = sorted(range(len(prompts)), key=size, reverse=True)  # what does not fit into memory fails at once
    return [order[first : first + batch] for first in range(0, len(order), batch)]


def _answer(
    target: Target, prompts: list[_Prompt], generation: GenerationSettings, settings: DistillSettings
) -> list[dict[str, Any]]:
    """Answers a batch turn by turn. A record a prompt: row (None without an answer), answers, tokens, ended."""
    keys = _keys(settings.seed, prompts)
    room = target.config.max_positions - generation.max_new_tokens
    turns: list[list[Turn]] = [[] for _ in prompts]
    made: list[list[list[int]]] = [[] for _ in prompts]
    ended = [""] * len(prompts)
    for step in range(max(len(prompt.questions) for prompt in prompts)):
        ids: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            if ended[i] or step >= len(prompt.questions):
                continue
            asked = [*turns[i], *prompt.questions[step]]
            conversation = Conversation(tuple(asked), "", prompt.where)
            try:
                tokens = encode(target.tokenizer, conversation, add_generation_prompt=True)
            except TemplateRefusalError:
                ended[i] = REFUSED
                continue
            if len(tokens) > room:
                ended[i] = FULL
                continue
            ids[i], turns[i] = tokens, asked
        if not ids:
            break
        # Always the same number of rows: one compilation a length, and the same sums wherever a prompt stands.
        rows = [*ids, *[next(iter(ids))] * (settings.batch - len(ids))]
        keys_now = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys[np.array(rows)], step)
        answers = generate(target.decoder, [ids[i] for i in rows], generation, keys_now)
        for i, answer in zip(ids, answers, strict=False):
            made[i].append(answer)
            turns[i].append(Turn("assistant", _text(target.tokenizer, answer, generation.end_tokens)))
    return [_record(*parts, generation.end_tokens) for parts in zip(prompts, turns, made, ended, strict=True)]


def _keys(seed: int, prompts: list[_Prompt]) -> Key[Array, " b"]:
    names = jnp.array([int(prompt.name[:8], 16) for prompt in prompts], jnp.uint32)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), names)


def _text(tokenizer: Any, answer: list[int], end_tokens: tuple[int, ...]) -> str:
    """The words of an answer as they were made; of one that was cut, without the pieces of a last character."""
    finished = answer[-1] in end_tokens
    ids = answer[:-1] if finished else answer
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text if finished else text.rstrip("\N{REPLACEMENT CHARACTER}")


def _record(
    prompt: _Prompt, turns: list[Turn], made: list[list[int]], ended: str, end_tokens: tuple[int, ...]
) -> dict[str, Any]:
    row = {
        "id": prompt.name,
        "conversations": [asdict(turn) for turn in turns],
        "truncated": sum(answer[-1] not in end_tokens for answer in made),
    }
    return {"row": row if made else None, "answers": len(made), "tokens": sum(map(len, made)), "ended": ended}


class _Work:
    """The files of one run: the journal, one line a batch after one that names the run; the output; its description."""

    def __init__(self, out: Path, run: dict[str, Any]):
        self.out, self.run = out, run
        self.journal, self.description = (out.with_name(out.name + end) for end in (".partial", ".run.json"))

    def finished(self) -> dict[str, int] | None:
        """The tallies of the run if it is over, None if there is something to do."""
        if self.journal.exists() or not self.out.exists():
            return None
        if not self.description.is_file():
            raise LayerwaveError(f"{self.out} exists, and no run of distill wrote it: remove it or give another --out")
        description = json.loads(self.description.read_text(encoding="utf-8"))
        self._require_same(description["run"], self.out)
        return description["tallies"]

    def resume(self) -> list[list[dict[str, Any]]]:
        """Opens the journal; returns its batches. What a kill left of a line is cut off."""
        content = self.journal.read_bytes() if self.journal.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:
            self._write(json.dumps(self.run) + "\n", "wb")
            return []
        try:
            run, *batches = map(json.loads, whole.decode().split("\n")[:-1])
        except ValueError as error:
            raise LayerwaveError(f"{self.journal} is damaged ({error}): remove it to start anew") from error
        self._require_same(run, self.journal)
        if len(whole) < len(content):
            os.truncate(self.journal, len(whole))
        return batches

    def append(self, batch: list[dict[str, Any]]) -> None:
        self._write(json.dumps(batch, ensure_ascii=False) + "\n", "ab")

    def finish(self, records: list[dict[str, Any]]) -> dict[str, int]:
        """Writes output and description, removes the journal, and returns the tallies."""
        rows = [record["row"] for record in records if record["row"] is not None]
        ended = Counter(record["ended"] for record in records)
        tallies = {
            REFUSED: ended[REFUSED],
            FULL: ended[FULL],
            "conversations": len(rows),
            "answers": sum(record["answers"] for record in records),
            "answers cut at max_new_tokens": sum(row["truncated"] for row in rows),
            "tokens": sum(record["tokens"] for record in records),
        }
        if not rows:
            raise LayerwaveError(f"not one answer ({listed(tallies)}): give prompts that the target has room for")
        with whole_file(self.out) as path:
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        with whole_file(self.description) as path:
            path.write_text(json.dumps({"run": self.run, "tallies": tallies}, indent=1) + "\n", encoding="utf-8")
        self.journal.unlink()
        return tallies

    def _require_same(self, run: dict[str, Any], path: Path) -> None:
        differing = [name for name in self.run if run.get(name) != self.run[name]]
        if differing:
            raise LayerwaveError(
                f"{path} is of a run with other {', '.join(differing)} ({run.get(differing[0])!r}, now "
                f"{self.run[differing[0]]!r}): repeat its settings, remove it, or give another --out"
            )

    def _write(self, line: str, mode: str) -> None:
        """One write, on disk before the next batch begins: a kill leaves whole lines and at most one torn."""
        try:
            with self.journal.open(mode, buffering=0) as file:
                file.write(line.encode())
                os.fsync(file.fileno())
        except OSError as error:
            raise LayerwaveError(
                f"{self.journal} cannot be written ({error.strerror}): make room, then run the same command again"
            ) from error


def listed(tallies: Mapping[str, int]) -> str:
    """The tallies that are not zero, in words."""
    return "; ".join(f"{count:,} {what}" for what, count in tallies.items() if count)
