"""Plain batched generation: what `decode` does without a draft, for callers that want whole answers."""

from jaxtyping import Array, Key

from layerwave.decoding.engine import Prompts, check_prompts, decode
from layerwave.decoding.sampling import GenerationSettings
from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder


def generate(
    decoder: Decoder,
    prompts: Prompts,
    settings: GenerationSettings,
    key: Key[Array, ""] | Key[Array, " b"],
) -> list[list[int]]:
    """Continues each prompt; a prompt's continuation does not depend on the others in the batch.

    (Only as far as rounding goes: a batch of another shape may sum in another order.)

    Args:
      key: one a prompt, or one for all, which is split among them by their places.

    Returns:
      The new token ids of each prompt, the end token included where it was reached.

    Raises:
      LayerwaveError: what `decode` refuses, and a prompt that leaves no room for `max_new_tokens` in the target's
        context.
    """
    check_prompts(decoder, prompts, settings)
    longest, room = max(map(len, prompts)), decoder.config.max_positions - settings.max_new_tokens
    if longest > room:
        raise LayerwaveError(
            f"a prompt has {longest} tokens, and {settings.max_new_tokens} new ones leave room for {room}; "
            "shorten the prompt or lower max_new_tokens"
        )
    return [list(continuation.tokens) for continuation in decode(decoder, prompts, settings, key)]
