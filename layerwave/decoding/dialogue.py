"""Conversations with a target: it answers question after question, its own earlier answers in view."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from layerwave.calibration.conversations import Conversation, Turn
from layerwave.calibration.tokens import TemplateRefusalError, encode
from layerwave.errors import LayerwaveError
from layerwave.files.reading import inside, read_object, typed
from layerwave.targets import Target
from layerwave.targets.target import MINI, MINI_FOLDER

REFUSED = "rows ended by the chat template"
FULL = "rows ended for want of positions"


@dataclass(frozen=True)
class Prompt:
    """The questions of one conversation, each after the system turns before it.

    where: its place in the file, for messages. name: hexadecimal digest, which its samples depend on.
    """

    questions: tuple[tuple[Turn, ...], ...]
    where: str
    name: str


@dataclass
class Dialogue:
    """What became of a prompt. ended: why questions are left without an answer, or nothing."""

    turns: list[Turn] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    """Tokens, the end token included where it was reached."""
    ended: str = ""


Answer = Callable[[list[int], list[list[int]], Key[Array, " b"]], Sequence[Sequence[int]]]
"""Makes the next answers: (indices of the prompts that ask, token ids, keys) -> tokens.

Ids and keys have as many rows as the batch; those behind the prompts that ask are repetitions, whose answers nobody
looks at.
"""


def converse(
    target: Target,
    prompts: Sequence[Prompt],
    answer: Answer,
    *,
    seed: int,
    room: int,
    batch: int,
    end_tokens: tuple[int, ...],
) -> list[Dialogue]:
    """Answers at most `batch` prompts turn by turn.

    A conversation ends early where the template refuses a turn, or what was said and asked has more than `room` tokens.
    """
    keys = _keys(seed, prompts)
    dialogues = [Dialogue() for _ in prompts]
    for step in range(max(len(prompt.questions) for prompt in prompts)):
        ids: dict[int, list[int]] = {}
        for i, (prompt, dialogue) in enumerate(zip(prompts, dialogues, strict=True)):
            if dialogue.ended or step >= len(prompt.questions):
                continue
            asked = [*dialogue.turns, *prompt.questions[step]]
            conversation = Conversation(tuple(asked), "", prompt.where)
            try:
                tokens = encode(target.tokenizer, conversation, add_generation_prompt=True)
            except TemplateRefusalError:
                dialogue.ended = REFUSED
                continue
            if len(tokens) > room:
                dialogue.ended = FULL
                continue
            ids[i], dialogue.turns = tokens, asked
        if not ids:
            break
        # Always the same number of rows: one compilation a length, and the same sums wherever a prompt stands.
        rows = [*ids, *[next(iter(ids))] * (batch - len(ids))]
        keys_now = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys[np.array(rows)], step)
        answers = answer(list(ids), [ids[i] for i in rows], keys_now)
        for i, made in zip(ids, answers, strict=False):
            dialogues[i].answers.append(list(made))
            dialogues[i].turns.append(Turn("assistant", _text(target.tokenizer, list(made), end_tokens)))
    return dialogues


def batches(prompts: Sequence[Prompt], batch: int) -> list[list[int]]:
    """Indices of the prompts batch by batch: alike in turns and length, the longest first."""

    def size(i: int) -> tuple[int, int]:
        questions = prompts[i].questions
        return len(questions), sum(len(turn.content) for question in questions for turn in question)

    order = sorted(range(len(prompts)), key=size, reverse=True)  # what does not fit into memory fails at once
    return [order[first : first + batch] for first in range(0, len(order), batch)]


def end_tokens(target: Target) -> tuple[int, ...]:
    """Tokens with which the target ends an answer: its tokenizer's, and those that generation_config.json names.

    Raises:
        LayerwaveError: there are none.
    """
    path = _generation_config(target.name)
    remedy = "correct the file, or remove it"
    named = read_object(path, remedy).get("eos_token_id") if path.is_file() else None
    named = typed(int | tuple[int, ...] | None, named, f"{path}: eos_token_id")
    own = target.tokenizer.eos_token_id
    found = {token for token in (own, *(named if isinstance(named, tuple) else [named])) if token is not None}
    if not found:
        raise LayerwaveError(f"{target.name} names no end token: put eos_token_id into generation_config.json")
    return tuple(sorted(found))


def _generation_config(name: str) -> Path:
    """Where the file lies beside the weights of the target of this name, if it has one."""
    folder, file = MINI_FOLDER if name == MINI else Path(name), "generation_config.json"
    if folder.is_dir():
        return inside(folder, file, "put the file itself there")
    from huggingface_hub import try_to_load_from_cache

    return Path(str(try_to_load_from_cache(name, file)))  # loading a hub id left it in the cache


def _keys(seed: int, prompts: Sequence[Prompt]) -> Key[Array, " b"]:
    names = jnp.array([int(prompt.name[:8], 16) for prompt in prompts], jnp.uint32)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), names)


def _text(tokenizer: Any, answer: list[int], end_tokens: tuple[int, ...]) -> str:
    """The words of an answer as they were made; of one that was cut, without the pieces of a last character."""
    finished = answer[-1] in end_tokens
    ids = answer[:-1] if finished else answer
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text if finished else text.rstrip("\N{REPLACEMENT CHARACTER}")
