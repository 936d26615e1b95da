"""Token samples whose truth is planted: what the target says next is a linear function of two known layers."""

from dataclasses import replace

import numpy as np

from layerwave.calibration import Calibration, CalibrationSettings
from layerwave.calibration.token_sample import TOP_TOKENS, TokenSample

WIDTH, VOCABULARY = 12, 40


def planted_tokens(
    num_layers: int,
    layers: tuple[int, int],
    *,
    fitting: int = 160,
    scoring: int = 120,
    samples: int = 12,
    noise: float = 0.3,
    seed: int = 0,
) -> TokenSample:
    """Layer `layers[0]` holds two thirds of what the next state needs, `layers[1]` the rest; all others are noise."""
    rng = np.random.default_rng(seed)
    count = fitting + scoring
    states = rng.normal(size=(num_layers, count, WIDTH))
    embeddings = rng.normal(size=(count, WIDTH))
    first, second = (rng.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH) for _ in layers)
    normed = 2 * states[layers[0]] @ first + states[layers[1]] @ second + noise * rng.normal(size=(count, WIDTH))
    head = rng.normal(size=(VOCABULARY, WIDTH))
    logits = normed @ head.T
    scored = logits[fitting:]
    top = np.argsort(-scored, axis=1)[:, :TOP_TOKENS]
    vocabulary = np.unique(top)
    # Fitting samples come first, scoring samples after them: no sample stands on both sides.
    of_sample = np.concatenate([np.arange(fitting) % samples, samples + np.arange(scoring) % samples])
    return TokenSample(
        states=states.astype(np.float32),
        embeddings=embeddings.astype(np.float32),
        normed=normed.astype(np.float32),
        head=head[vocabulary].astype(np.float32),
        vocabulary=vocabulary.astype(np.int32),
        top_tokens=top.astype(np.int32),
        log_normaliser=np.log(np.exp(scored).sum(axis=1)).astype(np.float32),
        samples=of_sample.astype(np.uint64),
        positions=np.arange(count, dtype=np.int32),
        priorities=np.sort(rng.integers(2**63, size=count)).astype(np.uint64),
        sinks=np.zeros(count, bool),
    )


def with_tokens(calibration: Calibration, tokens: TokenSample) -> Calibration:
    """The calibration as if its pass had drawn these tokens; given states get settings, which say so."""
    settings = calibration.settings or CalibrationSettings(block=calibration.sums.shape[2], replicates=0)
    return replace(calibration, settings=settings, tokens=tokens)
