"""The draft of the ecosystem's checkpoints in plain numpy, float64: one slot at a time, one key at a time.

Written from the published description, without the package: tensors by their SpecForge names, every key that a slot
sees named in a list, every slot unrolled by itself.
"""

import numpy as np


def norm(x, scale, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * scale


def turned(x, position, theta):
    """Rotary embedding of one head's vector: channel i turns with channel i + half."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


class LiteralDraft:
    """`tensors`: of a checkpoint; `sizes`: query heads, key heads, head_dim; `options`: names that are on."""

    def __init__(self, tensors, sizes, eps, theta, options=()):
        self.t = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.heads, self.kv_heads, self.head_dim = sizes
        self.eps, self.theta, self.options = eps, theta, options

    def features(self, states):
        """`g` of one position from the `(m, D)` states of its layers."""
        if "fc_norm" in self.options:
            states = [norm(s, self.t[f"fc_norm.{i}.weight"], self.eps) for i, s in enumerate(states)]
        joined = np.concatenate(list(states))
        if "norm_before_fc" in self.options:
            joined = norm(joined, self.t["input_norm.weight"], self.eps)
        return self.t["fc.weight"] @ joined

    def attention_input(self, embedded, feature):
        e = norm(embedded, self.t["midlayer.input_layernorm.weight"], self.eps)
        h = norm(feature, self.t["midlayer.hidden_norm.weight"], self.eps)
        return np.concatenate([e, h]), h

    def key_value(self, embedded, feature, position):
        x, _ = self.attention_input(embedded, feature)
        key, value = (
            (self.t[f"midlayer.self_attn.{kind}_proj.weight"] @ x).reshape(self.kv_heads, -1) for kind in "kv"
        )
        return [turned(k, position, self.theta) for k in key], value

    def step(self, embedded, feature, position, visible):
        """Output before the final norm of a query that sees `visible`, a list of (keys, values) of single slots."""
        x, h = self.attention_input(embedded, feature)
        query = (self.t["midlayer.self_attn.q_proj.weight"] @ x).reshape(self.heads, -1)
        mixed = []
        for head, q in enumerate(query):
            group = head // (self.heads // self.kv_heads)
            q = turned(q, position, self.theta)
            weights = softmax(np.array([q @ keys[group] for keys, _ in visible]) / np.sqrt(self.head_dim))
            mixed.append(sum(w * values[group] for w, (_, values) in zip(weights, visible, strict=True)))
        attended = self.t["midlayer.self_attn.o_proj.weight"] @ np.concatenate(mixed)
        out = (h if "norm_before_residual" in self.options else feature) + attended
        normed = norm(out, self.t["midlayer.post_attention_layernorm.weight"], self.eps)
        gate, up = (self.t[f"midlayer.mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        return out + self.t["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def final(self, out):
        return norm(out, self.t["norm.weight"], self.eps)

    def logits(self, out):
        return self.t["lm_head.weight"] @ self.final(out)

    def chain(self, t, steps, tokens, positions, documents, states, embedding):
        """Logits of slot `t` of one row in each step that has a token to read in the slot's document."""
        document = [s for s in range(len(tokens)) if documents[s] == documents[t]]
        embedded = lambda s: embedding[tokens[s]]  # noqa: E731
        visible = [
            self.key_value(embedded(s + 1), self.features(states[:, s]), positions[s])
            for s in document
            if s <= t and s + 1 < len(tokens)
        ]
        feature, found = self.features(states[:, t]), []
        for j in range(steps):
            read = t + 1 + j
            if read not in document:
                break
            if j > 0:
                visible.append(self.key_value(embedded(read), feature, positions[t] + j))
            out = self.step(embedded(read), feature, positions[t] + j, visible)
            found.append(self.logits(out))
            feature = self.final(out) if "norm_output" in self.options else out
        return found


def literal_unroll(draft, steps, decay, mean, rows, states, normed, head, embedding, vocabulary):
    """Loss, and the sums that are reported, by loops over rows, slots and steps.

    rows: (tokens, loss_mask, positions, documents), each `(b, T)`. states `(m, b, T, D)`: of the layers that are read.
    """
    names = ("loss", "trained", "asked", "correct", "overlap")
    sums = {name: np.zeros(steps) for name in names} | {
        name: 0.0 for name in ("complete", "accepted_greedy", "accepted_sampled")
    }
    batch, length = rows[0].shape
    for b in range(batch):
        tokens, loss_mask, positions, documents = (x[b] for x in rows)
        for t in range(length):
            logits = draft.chain(t, steps, tokens, positions, documents, states[:, b], embedding)
            hits, overlaps = [], []
            for j, z in enumerate(logits):
                predicted = t + 2 + j
                if predicted >= length or documents[predicted] != documents[t] or not loss_mask[predicted]:
                    continue
                full = softmax(head @ normed[b, t + 1 + j])
                p, q = full[vocabulary] / full[vocabulary].sum(), softmax(z)
                hits.append(float(vocabulary[q.argmax()] == full.argmax()))
                overlaps.append(np.minimum(full[vocabulary], q).sum())
                sums["asked"][j] += 1
                sums["correct"][j] += hits[-1]
                sums["overlap"][j] += overlaps[-1]
                if full.argmax() in vocabulary:
                    sums["trained"][j] += 1
                    sums["loss"][j] -= (p * np.log(q)).sum()
            if len(hits) == steps:
                sums["complete"] += 1
                sums["accepted_greedy"] += np.cumprod(hits).sum()
                sums["accepted_sampled"] += np.cumprod(overlaps).sum()
    denominator = np.maximum(sums["trained"], 1) if mean == "masked" else batch * length
    return (decay ** np.arange(steps) * sums["loss"] / denominator).sum(), sums
