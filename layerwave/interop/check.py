"""Does a written draft compute what the draft in memory computes?"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from layerwave.drafts import Draft, draft_from_tensors, draft_tensors
from layerwave.errors import LayerwaveError
from layerwave.interop.export import Exported
from layerwave.interop.importing import import_draft
from layerwave.targets import Target
from layerwave.targets.decoder import Keys, masked_attention

TOLERANCE = 1e-4
_SEED, _LENGTH, _STEPS = 0, 24, 2


@dataclass(frozen=True)
class ExportCheck:
    """Largest differences of logits over the largest logit.

    difference: of the draft read back from the one in memory, both in the file's dtype. rounding: of what was read back
    from the unrounded draft, that is, what the file's dtype costs.
    """

    difference: float
    rounding: float


def check_export(draft: Draft, target: Target, exported: Exported) -> ExportCheck:
    """Reads the directory back and compares the logits of two steps on a seeded random batch.

    Raises:
        LayerwaveError: what was written cannot be imported, or gives other logits than the draft by more than 1e-4.
    """
    found = import_draft(exported.directory, target)
    if found.config != draft.config or found.vocabulary.fingerprint != draft.vocabulary.fingerprint:
        raise LayerwaveError(f"{exported.directory} holds another draft than the one given: export it again")
    rounded_tensors = draft_tensors(draft, jnp.dtype(exported.dtype))
    rounded = draft_from_tensors(draft.config, rounded_tensors, draft.target_fingerprint, draft.target_name)

    random = np.random.default_rng(_SEED)
    tokens = jnp.asarray(random.integers(0, draft.config.vocab_size, (1, _LENGTH)), jnp.int32)
    shape = (len(draft.config.layers), 1, _LENGTH, draft.config.target_hidden_size)
    states = jnp.asarray(random.standard_normal(shape), jnp.float32)
    embedding = target.decoder.embed_tokens.embedding[...]
    read, kept, plain = (chain_logits(d, embedding, tokens, states, _STEPS) for d in (found, rounded, draft))
    largest = float(jnp.abs(plain).max())
    check = ExportCheck(*(float(jnp.abs(read - other).max()) / largest for other in (kept, plain)))
    if not check.difference <= TOLERANCE:
        raise LayerwaveError(
            f"{exported.directory}: the draft read back gives logits that differ by a share of {check.difference:.3g}, "
            f"more than {TOLERANCE}: this is a fault of layerwave, please report it"
        )
    return check


def chain_logits(
    draft: Draft, embedding: Float[Array, "V d"], tokens: Int[Array, "b T"], states: Float[Array, "m b T D"], steps: int
) -> Float32[Array, "J b T Vd"]:
    """Logits of the first `steps` steps of the training-time test: step j takes token t + 1 + j in slot t.

    A query sees the first step's slots up to its own, and its own slot of every later step.

    Beyond the last token stands token 0, as in the trainers.
    """
    module, order = draft.module, jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    causal, own = order[:, None, :] <= order[:, :, None], order[:, None, :] == order[:, :, None]
    features, seen, logits = module.fuse(states), [], []
    for step in range(steps):
        ahead = jnp.pad(tokens[:, 1 + step :], [(0, 0), (0, 1 + step)])
        mask = own if step else causal
        out, kept = module.block(embedding[ahead], features, order + step, masked_attention(mask, *seen))
        seen.append(Keys(*kept, mask))
        logits.append(module.logits(out))
        features = module.feedback(out)
    return jnp.stack(logits)
