"""What the families' configs mean, and that each part of a decoder does what it says, without torch."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from layerwave.decoding import GenerationSettings, TreeSettings, decode
from layerwave.drafts import DraftConfig, DraftVocabulary, initial_draft
from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder, DecoderConfig, KVCache, Target
from layerwave.targets.checkpoint import TensorFiles, load_decoder, save_decoder
from layerwave.targets.config import Experts
from layerwave.targets.experts import MixtureOfExperts
from layerwave.targets.families import FAMILIES
from layerwave.targets.rope import Rope, rotation
from tests.configs import LLAMA
from tests.targets.variants import GOLDEN

WINDOW = 5
# Everything at once: local and global layers with their own rotations, norms on both sides, experts.
MIXED = replace(
    LLAMA,
    norms="both",
    norm_offset=1.0,
    activation="gelu_tanh",
    embed_scale=4.0,
    qk_norm=True,
    query_pre_attn_scalar=5.0,
    rope=Rope(1e6, "linear", factor=2.0),
    local_rope=Rope(1e3),
    sliding_window=WINDOW,
    sliding_layers=(True, False, True),
    experts=Experts(count=6, per_token=2, size=12, normalized=True),
)
LONG = replace(
    LLAMA,
    rope=Rope(
        1e4,
        "longrope",
        original_max_positions=20,
        partial=0.75,
        attention_factor=1.2,
        short_factor=(1.0, 1.5, 2.0),
        long_factor=(2.0, 5.0, 9.0),
    ),
)
KEY = jax.random.key(0)


def decoder_of(config):
    """Random, with weights large enough that every part of a layer shows."""
    decoder, rng = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), np.random.default_rng(0)
    for path, leaf in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        near = 1.0 - config.norm_offset if path[-1] == "scale" else 0.0
        leaf.set_value(jnp.asarray(near + 0.3 * rng.normal(size=leaf.shape), jnp.float32))
    return decoder


@pytest.fixture(scope="module")
def mixed():
    return decoder_of(MIXED)


@nnx.jit
def states_of(decoder, tokens, cache=None, **options):
    output = decoder(tokens, cache=cache, **options)
    counts = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    return output.states, cache and cache.extended(output.keys, output.values, counts)


def tokens_of(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, LLAMA.vocab_size, shape), jnp.int32)


def test_experts_are_what_a_loop_over_tokens_gives():
    for normalized in (False, True):
        config = replace(MIXED, experts=replace(MIXED.experts, normalized=normalized))
        module = MixtureOfExperts(config, jnp.float32, nnx.Rngs(1))
        x = np.random.default_rng(0).normal(size=(2, 5, LLAMA.hidden_size)).astype(np.float32)
        router, experts = np.asarray(module.gate.kernel[...]), module.experts
        gate, up, down = (np.asarray(m.kernel[...]) for m in (experts.gate_proj, experts.up_proj, experts.down_proj))
        expected = np.zeros_like(x)
        for at in np.ndindex(x.shape[:2]):
            odds = np.exp(x[at] @ router)
            chosen = np.argsort(-odds)[:2]
            for e in chosen:
                weight = odds[e] / (odds[chosen] if normalized else odds).sum()
                expected[at] += weight * ((np.asarray(jax.nn.gelu(x[at] @ gate[e])) * (x[at] @ up[e])) @ down[e])
        given = nnx.jit(lambda module, x: module(x))(module, jnp.asarray(x))
        np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-6)


def test_a_tokens_state_does_not_depend_on_its_batch_mates(mixed):
    """Mates that crowd the same experts, other mates, none, and padding behind."""
    row = tokens_of(12, seed=1)
    alone, _ = states_of(mixed, row[None])
    for mates in (jnp.broadcast_to(row[None], (3, 12)), tokens_of((3, 12), seed=2), jnp.zeros((3, 12), jnp.int32)):
        together, _ = states_of(mixed, jnp.concatenate([mates, row[None]]))
        np.testing.assert_allclose(together[:, 3], alone[:, 0], rtol=1e-5, atol=1e-5)
    padded, _ = states_of(mixed, jnp.pad(row, (0, 20))[None])
    np.testing.assert_allclose(padded[:, 0, :12], alone[:, 0], rtol=1e-5, atol=1e-5)


def test_a_window_is_seen_only_by_the_layers_that_slide():
    """A change of the first token reaches one window further in every sliding layer, and everything by a full one."""
    reach = WINDOW - 1
    for sliding, expected in (((True, True, True), [reach, 2 * reach, 3 * reach]), ((True, False, True), [reach, 19])):
        decoder = decoder_of(replace(LLAMA, sliding_window=WINDOW, sliding_layers=sliding))
        tokens = tokens_of((1, 20))
        changed = tokens.at[0, 0].set((tokens[0, 0] + 1) % LLAMA.vocab_size)
        differs = jnp.any(states_of(decoder, tokens)[0] != states_of(decoder, changed)[0], axis=-1)[:, 0]
        for layer, last in enumerate(expected):
            assert jnp.flatnonzero(differs[layer]).tolist() == list(range(last + 1))


def test_a_window_with_a_cache_is_that_without(mixed):
    tokens = tokens_of((2, 19), seed=4)
    whole, _ = states_of(mixed, tokens)
    cache, parts = KVCache.empty(MIXED, 2, 32, jnp.float32), []
    for begin, end in ((0, 8), (8, 9), (9, 17), (17, 18), (18, 19)):
        states, cache = states_of(mixed, tokens[:, begin:end], cache=cache)
        parts.append(states)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=2), whole, rtol=1e-4, atol=1e-4)


def test_a_window_over_a_tree_counts_positions_and_not_slots(mixed):
    """Nodes of three branches, whose slots lie further apart than their positions."""
    prefix, nodes = tokens_of((1, 9), seed=5), tokens_of((1, 8), seed=6)
    parents, cached = [None, 0, 0, 0, 1, 2, 4, 6], KVCache.empty(MIXED, 1, 17, jnp.float32)
    _, cached = states_of(mixed, prefix, cache=cached)
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if node else []), node])
    mask = np.zeros((1, 8, 8), bool)
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    positions = jnp.asarray([[8 + len(path) for path in paths]], jnp.int32)
    states, _ = states_of(mixed, nodes, positions=positions, mask=jnp.asarray(mask), cache=cached)
    rows = np.zeros((8, 9 + max(map(len, paths))), np.int32)
    for row, path in zip(rows, paths, strict=True):
        row[: 9 + len(path)] = np.concatenate([prefix[0], nodes[0, np.array(path)]])
    alone, _ = states_of(mixed, jnp.asarray(rows))
    for node, path in enumerate(paths):
        np.testing.assert_allclose(states[:, 0, node], alone[:, node, 8 + len(path)], rtol=1e-4, atol=1e-4)


def test_decoding_with_a_draft_is_greedy_decoding_of_whole_sequences():
    """The draft of such a target is a plain Llama layer."""
    config = replace(MIXED, rope=LONG.rope, local_rope=Rope(1e3, partial=LONG.rope.partial))
    decoder = decoder_of(config)
    target = Target("random", config, decoder, None, "0" * 64)
    vocabulary = DraftVocabulary.from_counts(np.ones(LLAMA.vocab_size, np.int64), LLAMA.vocab_size)
    draft = initial_draft(target, (0, 2), vocabulary, KEY)
    # Sequences that stay within LongRoPE's original context, that reach its end, and that begin behind it.
    prompts = [tokens_of(n, seed=n).tolist() for n in (3, 16, 24)]
    settings = GenerationSettings(max_new_tokens=9)
    plain = decode(decoder, prompts, settings, KEY)
    drafted = decode(decoder, prompts, settings, KEY, draft, TreeSettings(8, 3, 3))
    assert [c.tokens for c in drafted] == [c.tokens for c in plain]
    last = nnx.jit(lambda decoder, tokens, n: decoder.logits(decoder(tokens, lengths=n[None]).normed[0, n - 1]))
    for prompt, found in zip(prompts, plain, strict=True):
        ids = list(prompt)
        for token in found.tokens:
            padded = jnp.asarray([ids + [0] * (40 - len(ids))], jnp.int32)
            assert token == int(last(decoder, padded, jnp.int32(len(ids))).argmax())
            ids.append(token)
    # Beyond 20 tokens, keys in the cache would have to be turned otherwise.
    stops = [("max_new_tokens", 9), ("context", 20 + 1 - 16), ("max_new_tokens", 9)]
    assert [(c.stop, len(c.tokens)) for c in plain] == stops


@pytest.mark.parametrize("rope", [LONG.rope, Rope(1e4, "dynamic", factor=4.0, original_max_positions=20)])
def test_a_rotation_that_depends_on_the_length_is_each_sequences_own(rope):
    positions = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32)[None], (3, 24))
    lengths = jnp.array([20, 21, 24], jnp.int32)
    together = rotation(positions, rope, 8, lengths)
    for i in range(3):
        for joint, alone in zip(together, rotation(positions[:1], rope, 8, lengths[i : i + 1]), strict=True):
            np.testing.assert_allclose(joint[i], alone[0], rtol=1e-5, atol=1e-6)
    within, longer, longest = (np.asarray(turned) for turned in together[0])
    assert np.abs(within - longer).max() > 0.01
    assert (np.abs(longer - longest).max() > 0.01) == (rope.kind == "dynamic")


def test_lengths_and_not_padding_decide():
    decoder, row = decoder_of(LONG), tokens_of((1, 12))
    alone, _ = states_of(decoder, row)
    padded = jnp.pad(row, ((0, 0), (0, 20)))
    known, _ = states_of(decoder, padded, lengths=jnp.array([12], jnp.int32))
    np.testing.assert_allclose(known[:, :, :12], alone, rtol=1e-5, atol=1e-5)
    unknown, _ = states_of(decoder, padded)
    assert np.abs(unknown[:, :, :12] - alone).max() > 0.01


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_attention_factors(kind):
    """Of YaRN: 0.1 ln(4) + 1, or the ratio of two such; of LongRoPE sqrt(1 + ln(8) / ln(16)); or what the file says."""
    extra = {"short_factor": [1.0], "long_factor": [2.0]} if kind == "longrope" else {"factor": 4.0}
    scaling = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 16, **extra}

    def factor(**more):
        return Rope.from_hf({"rope_parameters": scaling | more, "max_position_embeddings": 128}).attention_factor

    if kind == "yarn":
        assert factor() == pytest.approx(1.1386294)
        assert factor(mscale=2.0, mscale_all_dim=1.0) == pytest.approx(1.2772589 / 1.1386294)
        assert factor(mscale=2.0) == factor()
    else:
        assert factor() == pytest.approx((1 + 3 / 4) ** 0.5)
        assert factor(factor=1.0) == 1.0
    assert factor(attention_factor=1.5) == 1.5


@pytest.mark.parametrize("variant", ["phi3_longrope", "qwen3_moe", "gemma3_text", "mistral_yarn_tied", "olmo2"])
def test_what_is_read_is_written_alike(variant, tmp_path):
    """Fused projections put together again, experts one by one."""
    raw = json.loads((GOLDEN / variant / "config.json").read_text())
    config = DecoderConfig.from_hf(raw)
    decoder = load_decoder(config, TensorFiles.open(GOLDEN / variant), jnp.float32)
    save_decoder(decoder, tmp_path / "model.safetensors", jnp.float32)
    given, written = (load_file(folder / "model.safetensors") for folder in (GOLDEN / variant, tmp_path))
    assert given.keys() == written.keys()
    for name, tensor in given.items():
        np.testing.assert_array_equal(written[name], tensor)


@pytest.mark.parametrize("written", ["language_model.model.", "model.language_model."])
def test_a_text_model_inside_a_multimodal_checkpoint(written, tmp_path):
    """Both spellings of its names; towers are passed over, anything else is not."""
    text = json.loads((GOLDEN / "gemma3_text" / "config.json").read_text())
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 16},
        "image_token_index": 262144,
    }
    config, plain = DecoderConfig.from_hf(raw), DecoderConfig.from_hf(text)
    assert replace(config, model_type="gemma3_text") == plain
    tensors = load_file(GOLDEN / "gemma3_text" / "model.safetensors")
    renamed = {name.replace("model.", written, 1): tensor for name, tensor in tensors.items()}
    tower = {f"{'model.' if written.startswith('model.') else ''}vision_tower.weight": np.zeros(3, np.float32)}
    save_file(renamed | tower, tmp_path / "model.safetensors")
    inside = load_decoder(config, TensorFiles.open(tmp_path), jnp.float32)
    alone = load_decoder(plain, TensorFiles.open(GOLDEN / "gemma3_text"), jnp.float32)
    pairs = zip(jax.tree.leaves(nnx.state(inside)), jax.tree.leaves(nnx.state(alone)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    save_file(renamed | {"audio_tower.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(LayerwaveError, match=r"unused audio_tower\.weight"):
        load_decoder(config, TensorFiles.open(tmp_path), jnp.float32)
    with pytest.raises(LayerwaveError, match="unknown keys audio_config"):
        DecoderConfig.from_hf(raw | {"audio_config": {}})
    with pytest.raises(LayerwaveError, match="text_config is None, but a gemma3 model is described there"):
        DecoderConfig.from_hf(raw | {"text_config": None})


PUBLISHED = {
    "Mistral-7B-v0.1": """{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
        "use_cache": true, "vocab_size": 32000}""",
    "gemma-3-12b-it": """{"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02,
        "mm_tokens_per_image": 256, "model_type": "gemma3", "text_config": {"hidden_size": 3840,
        "intermediate_size": 15360, "model_type": "gemma3_text", "num_attention_heads": 16, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "vision_config": {"hidden_size": 1152,
        "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model", "num_attention_heads": 16,
        "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": false}}""",
    "Mixtral-8x7B-v0.1": """{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000}""",
    "Qwen3-30B-A3B": """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
    # The factors are shortened to a head of 8 channels, of which 6 turn.
    "Phi-4-mini-instruct": """{"_name_or_path": "Phi-4-mini-instruct", "architectures": ["Phi3ForCausalLM"],
        "attention_bias": false, "attention_dropout": 0.0, "auto_map": {"AutoTokenizer": "Xenova/gpt-4o"},
        "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu",
        "hidden_size": 192, "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": false, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "phi3",
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": {"long_factor": [1, 1.118320672, 1.250641126],
        "short_factor": [1.0, 1.0, 1.0], "type": "longrope"}, "rope_theta": 10000.0, "sliding_window": 262144,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0", "use_cache": true,
        "vocab_size": 200064}""",
}
BIG = {name: DecoderConfig.from_hf(json.loads(text), has_head=False) for name, text in PUBLISHED.items()}


def test_published_configs_mean_what_their_families_do():
    mistral, gemma, mixtral, qwen, phi = BIG.values()
    assert (mistral.sliding_window, mistral.sliding_layers) == (4096, (True,) * 32)
    assert gemma.sliding_layers == (True, True, True, True, True, False) * 8
    assert (gemma.sliding_window, gemma.head_dim, gemma.vocab_size) == (1024, 256, 262208)
    assert (gemma.rope, gemma.local_rope) == (Rope(1e6, "linear", factor=8.0), Rope(1e4))
    assert (gemma.query_pre_attn_scalar, gemma.embed_scale, gemma.max_positions) == (256.0, 3840**0.5, 131072)
    assert (mixtral.experts, mixtral.sliding_layers) == (Experts(8, 2, 14336, True), ())
    assert (qwen.experts, qwen.intermediate_size) == (Experts(128, 8, 768, True), 6144)
    assert (phi.rope.kind, phi.rope.original_max_positions, phi.rope.partial) == ("longrope", 4096, 0.75)
    assert phi.rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)
    assert phi.tie_embeddings
    assert not mistral.experts


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Mistral-7B-v0.1", {"sliding_window": ...}, "the key sliding_window is missing; add it, null if there is"),
        ("Mistral-7B-v0.1", {"layer_types": ["full_attention"] * 32}, "0 of 32 layer_types .* slides in all"),
        ("Mixtral-8x7B-v0.1", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are only 8 experts"),
        ("Mixtral-8x7B-v0.1", {"num_local_experts": ...}, r"num_local_experts say \[\], expected one number"),
        ("Qwen3-30B-A3B", {"num_local_experts": 64}, r"num_local_experts say \[64, 128\]"),
        ("Qwen3-30B-A3B", {"norm_topk_prob": ...}, "the key norm_topk_prob is missing"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported; supported: 1"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}, r"mlp_only_layers \[0\] is not supported; supported: \[\]"),
        ("Qwen3-30B-A3B", {"quantization_config": {"bits": 4}}, "unknown keys quantization_config"),
        ("Phi-4-mini-instruct", {"partial_rotary_factor": 1.0}, "longrope has .*3.* numbers, expected 4"),
        ("Phi-4-mini-instruct", {"full_attn_mod": 2}, "full_attn_mod 2 is not supported; supported: 1"),
        ("Phi-4-mini-instruct", {"rope_theta": ...}, "no rope_theta"),
    ],
)
def test_family_config_faults(name, changes, message):
    raw = json.loads(PUBLISHED[name])
    raw = {key: value for key, value in (raw | changes).items() if value is not ...}
    with pytest.raises(LayerwaveError, match=message):
        DecoderConfig.from_hf(raw, has_head=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported; supported: None"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ({"sliding_window": None}, None),
        ({"rope_parameters": {"rope_theta": 1e4}}, r"rope_parameters has \['rope_theta'\], expected full_attention"),
        ({"hidden_activation": "silu", "hidden_act": "gelu"}, "'gelu' and 'silu' is not supported"),
    ],
)
def test_gemma_config_faults(changes, message):
    raw = json.loads(PUBLISHED["gemma-3-12b-it"])
    raw["text_config"] |= changes
    if message is None:
        assert DecoderConfig.from_hf(raw, has_head=False).sliding_layers == ()
        return
    with pytest.raises(LayerwaveError, match=message):
        DecoderConfig.from_hf(raw, has_head=False)


def test_old_and_new_keys_of_gemmas_ropes_are_the_same():
    raw = json.loads(PUBLISHED["gemma-3-12b-it"])
    del raw["text_config"]["rope_scaling"]
    raw["text_config"]["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert DecoderConfig.from_hf(raw, has_head=False) == BIG["gemma-3-12b-it"]
    raw["text_config"] |= {"rope_parameters": None, "rope_theta": 2e6, "rope_local_base_freq": 3e4}
    config = DecoderConfig.from_hf(raw, has_head=False)
    assert (config.rope, config.local_rope) == (Rope(2e6), Rope(3e4))


def test_qwens_upper_layers_slide_when_told():
    raw = json.loads((GOLDEN / "qwen2_tied" / "config.json").read_text()) | {"sliding_window": 8, "layer_types": None}
    told = raw | {"use_sliding_window": True, "max_window_layers": 1}
    assert DecoderConfig.from_hf(told).sliding_layers == (False, True, True)
    assert DecoderConfig.from_hf(told | {"max_window_layers": 3}).sliding_layers == ()
    assert DecoderConfig.from_hf(raw | {"use_sliding_window": False}).sliding_layers == ()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_draft_for_any_target_is_a_plain_llama_layer(name):
    target = BIG[name]
    draft = DraftConfig.from_target(target, (1, 2), 32)
    layer = draft.layer_config()
    assert layer == replace(
        LLAMA,
        **{
            field: getattr(target, field)
            for field in "hidden_size intermediate_size num_heads num_kv_heads head_dim max_positions norm_eps".split()
        },
        num_layers=1,
        vocab_size=32,
        rope=Rope(1e4) if name.startswith("Phi") else target.rope,
    )
    assert DraftConfig.from_json(json.loads(json.dumps(draft.to_json()))) == draft
    with pytest.raises(LayerwaveError, match="a draft's RoPE of type 'longrope' that turns 75% of the channels is not"):
        DraftConfig.from_target(target, (1, 2), 32, rope=LONG.rope)


def test_every_family_has_a_name_in_other_tools():
    import transformers.models.auto.modeling_auto as auto

    names = {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "gemma3": "Gemma3ForConditionalGeneration"}
    assert {model_type: family.architecture for model_type, family in FAMILIES.items()} == {
        model_type: names[model_type] for model_type in FAMILIES
    }
