"""The method said literally in float64 numpy: concatenate features, SVD, centre, loop. Slow, plain, independent.

Nothing here comes from the package. Scores are compared after rounding to 10 digits, which is far above float64
rounding and far below any difference between sets that matters.
"""

from itertools import combinations

import numpy as np

DIGITS = 10


def concatenated(states, layers):
    return np.concatenate([states[layer] for layer in sorted(layers)], axis=1)


def entropy(states, layers, alpha=1.0):
    sigma = np.linalg.svd(concatenated(states, layers), compute_uv=False)
    p = sigma**2 / np.sum(sigma**2)
    p = p[p > 0]
    if alpha == 1:
        return float(-np.sum(p * np.log(p)))
    if alpha == np.inf:
        return float(-np.log(p.max()))
    return float(np.log(np.sum(p**alpha)) / (1 - alpha))


def biased_cka(representations):
    """All pairs: ‖YᵀX‖² / ‖XᵀX‖ ‖YᵀY‖ of features centred over the rows."""
    centred = [X - X.mean(0) for X in representations]
    products = np.array([[np.sum((Y.T @ X) ** 2) for Y in centred] for X in centred])
    norms = np.sqrt(np.diag(products))
    return products / np.outer(norms, norms)


def hsic_1(K, L):
    """Song et al. 2012, equation 5, without the factor 1 / n(n-3)."""
    n = len(K)
    K, L = K - np.diag(np.diag(K)), L - np.diag(np.diag(L))
    one = np.ones(n)
    return np.sum(K * L) + (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ K @ L @ one)


def debiased_cka(representations):
    grams = [X @ X.T for X in representations]
    products = np.array([[hsic_1(K, L) for L in grams] for K in grams])
    norms = np.sqrt(np.diag(products))
    return products / np.outer(norms, norms)


def conditional_transitions(states, layers, estimator="biased"):
    """δ_L(l) for every layer l; 0 for l = 0."""
    cka = {"biased": biased_cka, "debiased": debiased_cka}[estimator]
    matrix = cka([concatenated(states, set(layers) | {layer}) for layer in range(len(states))])
    return [0.0] + [float(np.linalg.norm(matrix[k] - matrix[k - 1])) for k in range(1, len(states))]


def best_first(scored, sign=1):
    return sorted(scored.items(), key=lambda item: (-sign * round(item[1], DIGITS), item[0]))


def middle_rule(ranked, size, num_layers):
    if size > 1:
        return ranked[0]
    return next(item for item in ranked if item[0][0] > num_layers // 2)


def beam_search(states, size, beam, extensions, alpha, sign=1):
    """The beams of all depths, and the choice. `extensions(set)` gives the scored sets that a set contributes."""
    num_layers = len(states)
    ranked = best_first({(layer,): entropy(states, (layer,), alpha) for layer in range(num_layers)}, sign)
    beams = [ranked[:beam]]
    for _ in range(size - 1):
        pooled = {}
        for layers, _ in beams[-1]:
            pooled.update(extensions(layers))
        ranked = best_first(pooled, sign)
        beams.append(ranked[:beam])
    return beams, middle_rule(ranked, size, num_layers)


def elsi(states, size, beam=10, expand=10, alpha=1.0, sign=1):
    def extensions(layers):
        others = [layer for layer in range(len(states)) if layer not in layers]
        scored = {tuple(sorted((*layers, l))): entropy(states, (*layers, l), alpha) for l in others}
        return dict(best_first(scored, sign)[:expand])

    return beam_search(states, size, beam, extensions, alpha, sign)


def elsi_c(states, size, beam=10, pool=5, alpha=1.0, estimator="biased"):
    def extensions(layers):
        delta = conditional_transitions(states, layers, estimator)
        others = [layer for layer in range(len(states)) if layer not in layers]
        tried = sorted(others, key=lambda layer: (-round(delta[layer], DIGITS), layer))[:pool]
        return {tuple(sorted((*layers, l))): entropy(states, (*layers, l), alpha) for l in tried}

    return beam_search(states, size, beam, extensions, alpha)


def exhaustive(states, size, alpha=1.0):
    scored = {layers: entropy(states, layers, alpha) for layers in combinations(range(len(states)), size)}
    ranked = best_first(scored)
    return ranked, middle_rule(ranked, size, len(states))


def trace_weighted(states):
    return np.stack([X / np.sqrt(np.trace(X @ X.T)) for X in states])
