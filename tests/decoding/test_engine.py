"""Speculative decoding makes the tokens of plain decoding, and its draft sees what it shall see."""

from dataclasses import replace
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.stats import chi2

from layerwave.decoding import GenerationSettings, TreeSettings, decode, draft_round, generate
from layerwave.decoding.engine import _begin
from layerwave.decoding.rounds import one_round, rounds
from layerwave.drafts import DraftVocabulary, initial_draft
from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder, Target
from layerwave.targets.decoder import masked_attention
from tests.configs import QWEN3
from tests.decoding.literal_tree import literal_tree

V = 12
CONFIG = replace(QWEN3, vocab_size=V)
TREE = TreeSettings(16, 4, 4)
NEW = 30
GREEDY = GenerationSettings(NEW)
SAMPLED = GenerationSettings(NEW, temperature=1.2, top_k=8, top_p=0.9)
KEY = jax.random.key(0)
PROMPTS = [np.random.default_rng(i).integers(0, V, 1 + 5 * i % 19).tolist() for i in range(12)]


def target_of(config, seed):
    """A random target whose layers are strong enough that it does not fall into a loop at once."""
    decoder = Decoder(config, rngs=nnx.Rngs(seed))
    scale(decoder.layers, 4)
    return Target("tiny", config, decoder, None, "fingerprint")


def scale(layers, factor):
    for projection in (layers.self_attn.o_proj, layers.mlp.down_proj):
        projection.kernel[...] = factor * projection.kernel[...]


def draft_of(target, tokens, layers=(0, 2), seed=1, **options):
    vocabulary = DraftVocabulary(np.sort(np.asarray(tokens)), target.config.vocab_size)
    return initial_draft(target, layers, vocabulary, jax.random.key(seed), **options)


def tokens_of(continuations):
    return [list(continuation.tokens) for continuation in continuations]


@pytest.fixture(scope="module")
def target():
    return target_of(CONFIG, 6)


@pytest.fixture(scope="module")
def plain(target):
    return {settings: generate(target.decoder, PROMPTS, settings, KEY) for settings in (GREEDY, SAMPLED)}


@pytest.fixture(scope="module")
def drafts(target, plain):
    """All of one shape: 8 tokens. `often`: those that the target says most; `seldom`: those that it says least."""
    said = np.bincount(np.concatenate(plain[GREEDY]), minlength=V)
    rank = np.argsort(-said, kind="stable")
    found = {
        "often": draft_of(target, rank[:8]),
        "other layers": draft_of(target, rank[:8], layers=(1, 2)),
        "seldom": draft_of(target, rank[-8:]),
    }
    heads = {
        "ties": np.zeros((8, 16)),
        "impossible": np.full((8, 16), -np.inf),
        "nan": np.full((8, 16), np.nan),
        "certain": np.where(np.arange(8)[:, None] == 3, 1e30, -1e30) * np.ones((8, 16)),
    }
    for name, head in heads.items():
        found[name] = draft_of(target, rank[:8])
        found[name].module.lm_head.embedding[...] = jnp.asarray(head, jnp.float32)
    return found


def test_the_target_says_many_things(plain):
    """Else what follows shows little."""
    assert len(set(np.concatenate(plain[GREEDY]).tolist())) >= 8
    assert len({tuple(answer) for answer in plain[GREEDY]}) == len(PROMPTS)


@pytest.mark.parametrize("name", ["often", "other layers", "seldom", "ties", "impossible", "nan", "certain"])
def test_greedy_tokens_are_those_of_plain_decoding(target, plain, drafts, name):
    found = decode(target.decoder, PROMPTS, GREEDY, KEY, drafts[name], TREE)
    assert tokens_of(found) == plain[GREEDY]
    accepted = sum(continuation.accepted for continuation in found)
    if name == "often":
        assert accepted[2:].sum() > 0
    if name in ("impossible", "nan"):
        assert accepted[1:].sum() == 0
        assert sum(continuation.drafted for continuation in found) == 0


@pytest.mark.parametrize("name", ["often", "ties", "certain"])
def test_sampled_tokens_are_those_of_plain_decoding(target, plain, drafts, name):
    """Not only in distribution: a token's randomness depends on its place alone."""
    found = decode(target.decoder, PROMPTS, SAMPLED, KEY, drafts[name], TREE)
    assert tokens_of(found) == plain[SAMPLED]
    assert plain[SAMPLED] != plain[GREEDY]
    if name == "often":
        assert sum(continuation.accepted for continuation in found)[2:].sum() > 0


def test_counts(target, drafts):
    for continuation in decode(target.decoder, PROMPTS, GREEDY, KEY, drafts["often"], TREE):
        kept = int((continuation.accepted * np.arange(TREE.levels)).sum())
        # Every round ends with a bonus token, but the last one may be cut at the limit before it.
        assert continuation.emitted == NEW - 1
        assert continuation.emitted - (continuation.rounds + kept) in (0, -1)
        assert continuation.drafted == (TREE.nodes - 1) * continuation.rounds
        assert continuation.stop == "max_new_tokens"
    for continuation in decode(target.decoder, PROMPTS, GREEDY, KEY):
        assert continuation.rounds == continuation.emitted == NEW - 1
        assert continuation.drafted == 0


@pytest.mark.parametrize("first", [0, 9, 20])
def test_end_tokens_stop_wherever_they_come(target, plain, drafts, first):
    """Tokens that are said soon or late, so that they stand in any place of a round, or nowhere."""
    ends = tuple(plain[GREEDY][1][first : first + 2])
    settings = GenerationSettings(NEW, end_token=ends)
    for answer, found in zip(
        plain[GREEDY], decode(target.decoder, PROMPTS, settings, KEY, drafts["often"], TREE), strict=True
    ):
        places = [place for place, token in enumerate(answer) if token in ends]
        assert list(found.tokens) == (answer[: places[0] + 1] if places else answer)
        assert found.stop == ("end_token" if places else "max_new_tokens")


@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_limits(target, plain, drafts, new):
    found = decode(target.decoder, PROMPTS, GenerationSettings(new), KEY, drafts["often"], TREE)
    assert tokens_of(found) == [answer[:new] for answer in plain[GREEDY]]


def test_the_context_ends(target, drafts):
    """Caches start with 64 slots and grow."""
    settings = GenerationSettings(1000)
    found = decode(target.decoder, PROMPTS, settings, KEY, drafts["often"], TREE)
    assert tokens_of(found) == tokens_of(decode(target.decoder, PROMPTS, settings, KEY))
    for prompt, continuation in zip(PROMPTS, found, strict=True):
        assert len(prompt) + len(continuation.tokens) == CONFIG.max_positions
        assert continuation.stop == "context"


def test_a_draft_of_fewer_positions_than_the_target(target, plain, drafts):
    """There is no table of positions that could end: the draft turns on, perhaps worse, and the answers stay."""
    short = replace(drafts["often"], config=replace(drafts["often"].config, max_positions=8))
    found = decode(target.decoder, PROMPTS, GREEDY, KEY, short, TREE)
    assert tokens_of(found) == plain[GREEDY]
    assert max(len(prompt) + len(made.tokens) for prompt, made in zip(PROMPTS, found, strict=True)) > 16


def test_a_chain_and_its_compilations(target, plain, drafts):
    """One compilation for each power of two of slots, whatever prompts, limits, end tokens, and drafts of one shape."""
    before = rounds._cache_size()
    chain = TreeSettings(4, 3, 1)
    found = decode(target.decoder, PROMPTS, GREEDY, KEY, drafts["often"], chain)
    assert tokens_of(found) == plain[GREEDY]
    assert all(continuation.drafted == 3 * continuation.rounds for continuation in found)
    for prompt, new, end, name in ((1, 5, 1, "seldom"), (20, 30, (2, 3), "other layers"), (40, 1, None, "nan")):
        settings = GenerationSettings(new, end_token=end)
        decode(target.decoder, [[1] * prompt] * len(PROMPTS), settings, KEY, drafts[name], chain)
    assert rounds._cache_size() == before + 1


def test_a_tree_of_one_level(target, plain, drafts):
    """Nothing is expanded: the children of the root are all that is drafted."""
    for tree in (TreeSettings(2, 1, 1), TreeSettings(4, 1, 3)):
        found = decode(target.decoder, PROMPTS, GREEDY, KEY, drafts["often"], tree)
        assert tokens_of(found) == plain[GREEDY]
        assert sum(continuation.accepted[1] for continuation in found) > 0


def test_batch_mates_do_not_matter(target, plain, drafts):
    together = decode(target.decoder, PROMPTS, GREEDY, KEY, drafts["often"], TREE)
    for i in (0, 5):
        others = [[(3 * j + i) % V] * (1 + j) for j in range(len(PROMPTS) - 1)]
        found = decode(target.decoder, [*others, PROMPTS[i]], GREEDY, KEY, drafts["often"], TREE)[-1]
        assert list(found.tokens) == plain[GREEDY][i]
        assert found.accepted.tolist() == together[i].accepted.tolist()


@pytest.mark.parametrize("options", [{}, {"norm_output": True, "fc_norm": True}])
def test_trees_are_those_of_a_draft_without_a_cache(target, plain, drafts, options):
    """In each round, against the draft computed anew along each path: with features of verified positions from the
    target, and its own behind them."""
    draft = draft_of(target, drafts["often"].vocabulary.tokens, **options)
    scale(draft.module.midlayer, 4)  # so that what it attends to decides
    plan, weights, request, state = _begin(target.decoder, [PROMPTS[7]], GREEDY, KEY, draft, TREE)
    moved = 0
    for _ in range(10):
        prefix = state.tokens[0, : int(state.cache.length[0]) + 1].tolist()
        state, tree, verdict = one_round(plan, weights, request, state)
        tokens, parents, _, scores = literal_tree(
            log_q_of(target, draft, prefix), draft.vocabulary.tokens, prefix[-1], TREE
        )
        assert tree.tokens[0].tolist() == tokens
        assert tree.parents[0].tolist() == parents
        np.testing.assert_allclose(tree.scores[0], scores, rtol=1e-4, atol=1e-4)
        moved += int(verdict.path[0, int(verdict.accepted[0])]) > int(verdict.accepted[0])
    assert moved  # some accepted nodes had to move up in the caches


def test_a_round_to_look_at(target, plain, drafts):
    """The tree behind the prompt and the answer's first token holds the accepted tokens along its path, and no more."""
    longest = 0
    for prompt, answer in zip(PROMPTS, plain[GREEDY], strict=True):
        tree, path = draft_round(target.decoder, prompt, GREEDY, KEY, drafts["often"], TREE)
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        assert [tokens[node] for node in path] == answer[: len(path)]
        assert [parents[node] for node in path[1:]] == list(path[:-1])
        assert answer[len(path)] not in [tokens[i] for i in range(1, TREE.nodes) if parents[i] == path[-1]]
        longest = max(longest, len(path))
    assert longest > 1


def test_rounds_are_plain_operations(target, drafts):
    """They lower for accelerators that are not there, without a call back to the host."""
    plan, weights, request, state = _begin(target.decoder, PROMPTS, SAMPLED, KEY, drafts["often"], TREE)
    exported = jax.export.export(rounds, platforms=["cuda", "tpu"])(plan, weights, request, state)
    assert exported.platforms == ("cuda", "tpu")
    assert "callback" not in exported.mlir_module()


def log_q_of(target, draft, prefix):
    """The draft's log-probabilities behind each path that follows the prefix, from whole sequences."""
    verified = draft.module.fuse(target_pass(target.decoder, padded(prefix))[0][jnp.array(draft.config.layers)])

    @cache
    def behind(path):
        """Log-probabilities of what follows, and the features of the next slot."""
        tokens = prefix + [int(draft.vocabulary.tokens[i]) for i in path]
        features = verified
        for depth in range(len(path)):
            features = features.at[:, len(prefix) - 1 + depth].set(behind(path[:depth])[1])
        _, embedded = target_pass(target.decoder, padded(tokens[1:]))
        return draft_pass(draft.module, embedded, features, len(tokens) - 1)

    return lambda path: np.asarray(behind(path)[0])


def padded(tokens):
    return jnp.asarray([tokens + [0] * (64 - len(tokens))], jnp.int32)


@nnx.jit
def target_pass(decoder, tokens):
    return decoder(tokens).states, decoder.embed_tokens(tokens)


@nnx.jit
def draft_pass(module, embedded, features, length):
    order = jnp.arange(embedded.shape[1], dtype=jnp.int32)[None]
    out, _ = module.block(embedded, features, order, masked_attention(order[:, None, :] <= order[:, :, None]))
    last = jax.lax.dynamic_slice_in_dim(out, length - 1, 1, axis=1)
    return jax.nn.log_softmax(module.logits(last)[0, 0]), module.feedback(last)[:, 0]


def test_distribution_of_whole_answers():
    """Chi-square over all continuations by three tokens of a vocabulary of five, against the target's own numbers."""
    size, draws, prompt = 5, 2000, [3, 1, 4]
    target = target_of(replace(CONFIG, vocab_size=size, num_layers=2), 8)
    draft = draft_of(target, [0, 1, 2, 4], layers=(0, 1))
    settings = GenerationSettings(3, temperature=0.8)
    found = decode(target.decoder, [prompt] * draws, settings, jax.random.key(4), draft, TreeSettings(6, 2, 2))
    observed = np.zeros((size,) * 3)
    np.add.at(observed, tuple(np.array(tokens_of(found)).T), 1)

    prefixes = jnp.asarray([[*prompt, *pair] for pair in product(range(size), repeat=2)], jnp.int32)
    logits = nnx.jit(lambda decoder: decoder.logits(decoder(prefixes).normed[:, 2:]))(target.decoder)
    p = np.asarray(jax.nn.softmax(logits / 0.8), np.float64).reshape(size, size, 3, size)
    expected = draws * p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]
    few = expected < 5
    cells = [(observed[~few], expected[~few]), (observed[few].sum(keepdims=True), expected[few].sum(keepdims=True))]
    statistic = sum(((seen - wanted) ** 2 / wanted).sum() for seen, wanted in cells)
    assert chi2.sf(statistic, (~few).sum()) > 0.01
    assert sum(continuation.accepted for continuation in found)[1:].sum() > 100


def test_faults(target, drafts):
    def fails(message, prompts=PROMPTS, settings=GREEDY, **options):
        with pytest.raises(LayerwaveError, match=message):
            decode(target.decoder, prompts, settings, KEY, **options)

    fails("got 0 prompts", [])
    fails("has the token 12, expected 0 to 11", [[12]])
    fails("end_token is 12", settings=GenerationSettings(end_token=12))
    fails("96 tokens, and the target's 96 positions leave none", [[1] * 96])
    fails("top_k of the tree is 9, but the draft has only 8 tokens", draft=drafts["often"], tree=TreeSettings(60, 8, 9))
    other = replace(drafts["often"].config, num_target_layers=4)
    draft = replace(drafts["often"], config=other)
    fails(r"the draft wants a target of .*\(4, 16, 16, 12\), got one of \(3,", draft=draft)
