"""A block drafter in plain torch, a slot at a time, straight from the formulas of DFlash (arXiv
2602.06036) and what its publishers' classes compute. It shares no code with the heads that it
judges, except for the spec."""

from __future__ import annotations

import torch

from drafters.dflash.spec import BlockHead, PreviousToken, Selector


def _norm(x, weight, eps):
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return x * scale if weight is None else x * scale * weight


class BlockOracle:
    """head: float32. table [V, H], matrix [V, H]: the target's embeddings and head."""

    def __init__(self, head: BlockHead, table, matrix) -> None:
        self.spec, self.body = head.spec, head.spec.body
        self.w = {name: torch.tensor(value) for name, value in head.weights.items()}
        self.ids = None if head.target_ids is None else torch.tensor(head.target_ids)
        self.table = self.w.get("embed_tokens", torch.as_tensor(table))
        self.matrix = self.w.get("lm_head", torch.as_tensor(matrix))

    def rotate(self, x, position):
        """x [heads, D] at one position; pairs beyond rope.rotated stand still."""
        half, rope = x.shape[-1] // 2, self.body.rope
        pair = torch.arange(half, dtype=torch.float64)
        angle = torch.where(pair < rope.rotated, position * rope.theta ** (-pair / half), 0.0)
        cos, sin = angle.cos().float(), angle.sin().float()
        low, high = x[:, :half], x[:, half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def entry(self, layer, x, position):
        """(key, value) [K, D] of an input x [H]."""
        body, name = self.body, f"layers.{layer}.self_attn."
        raw = (self.w[name + "k_proj"] @ x).view(body.kv_heads, -1)
        key = self.rotate(_norm(raw, self.w[name + "k_norm"], body.eps), position)
        if body.gemma:
            return key, _norm(raw, None, body.eps)
        return key, (self.w[name + "v_proj"] @ x).view(body.kv_heads, -1)

    def attention(self, layer, x, context, anchor):
        """x [U, H], normed; context [n, H] at positions 0 .. n - 1 = anchor - 1."""
        body, kind, name = self.body, self.body.layers[layer], f"layers.{layer}.self_attn."
        entries = [(p, *self.entry(layer, c, p)) for p, c in enumerate(context)]
        own = [(anchor + j, *self.entry(layer, row, anchor + j)) for j, row in enumerate(x)]
        out = []
        for j, row in enumerate(x):
            position = anchor + j
            seen = [e for e in entries if kind.window is None or e[0] > position - kind.window]
            seen += own[: j + 1] if kind.causal else own
            share = body.heads // body.kv_heads
            keys = torch.stack([e[1] for e in seen]).repeat_interleave(share, 1)
            values = torch.stack([e[2] for e in seen]).repeat_interleave(share, 1)
            q = (self.w[name + "q_proj"] @ row).view(body.heads, -1)
            q = self.rotate(_norm(q, self.w[name + "q_norm"], body.eps), position)
            scores = torch.einsum("nd,snd->ns", q, keys)
            if not body.gemma:
                scores = scores / body.head_dim**0.5
            mixed = torch.einsum("ns,snd->nd", scores.softmax(-1), values).flatten()
            out.append(self.w[name + "o_proj"] @ mixed)
        return torch.stack(out)

    def convolution(self, name, side, fed, x):
        """fed [U, H]: the sub-layer's input, which makes the coefficients. x [U, H]."""
        group = self.body.conv_group
        if not group:
            return x
        width, out = x.shape[1], []
        for j in range(len(x)):
            made = (self.w[f"{name}.kernel_projection"] @ fed[j]).view(2, 2, width // group)
            taps = self.w[f"{name}.base_kernel"][side] + made[side].repeat_interleave(group, 1)
            before = x[j - 1] if j else torch.zeros(width)
            out.append(x[j] * taps[0] + before * taps[1])
        return torch.stack(out)

    def layer(self, number, x, context, anchor):
        body, w, name = self.body, self.w, f"layers.{number}."

        def normed(part, rows):
            return _norm(rows, w[name + part], body.eps)

        def mlp(rows):
            gate, up = rows @ w[name + "mlp.gate_proj"].T, rows @ w[name + "mlp.up_proj"].T
            if body.gemma:
                gate = torch.nn.functional.gelu(gate, approximate="tanh")
            else:
                gate = gate * torch.sigmoid(gate)
            return (gate * up) @ w[name + "mlp.down_proj"].T

        if body.gemma:
            mixed = self.attention(number, normed("input_layernorm", x), context, anchor)
            x = x + normed("post_attention_layernorm", mixed)
            branch = mlp(normed("pre_feedforward_layernorm", x))
            x = x + normed("post_feedforward_layernorm", branch)
            return x * w[name + "layer_scalar"]
        fed = normed("input_layernorm", x)
        mixed = self.attention(
            number, self.convolution(name + "attention_conv", 0, fed, fed), context, anchor
        )
        x = x + self.convolution(name + "attention_conv", 1, fed, mixed)
        fed = normed("post_attention_layernorm", x)
        branch = mlp(self.convolution(name + "mlp_conv", 0, fed, fed))
        return x + self.convolution(name + "mlp_conv", 1, fed, branch)

    def hidden(self, features, token):
        """features [n, F] of all tokens before the anchor; token: the anchor's -> the slots' states
        [U, H] after the final norm."""
        spec, body = self.spec, self.body
        context = _norm(features @ self.w["fc"].T, self.w["hidden_norm"], body.eps)
        fed = [token, *[spec.mask_id] * (spec.slots - 1)]
        x = self.table[fed] * spec.embedding_scale
        for number in range(len(body.layers)):
            x = self.layer(number, x, context, len(features))
        return _norm(x, self.w["norm"], body.eps)

    def logits(self, hidden):
        """[K, D] of the slots that predict."""
        found = hidden[self.spec.first :] @ self.matrix.T
        cap = self.spec.softcap
        return found if cap is None else cap * torch.tanh(found / cap)

    def scores(self, hidden, logits, j, previous):
        """(scores [n], target's ids [n]) of draft j behind the token `previous`."""
        chooser, w = self.spec.chooser, self.w
        if isinstance(chooser, Selector):
            ids = logits[j].topk(chooser.candidates).indices
            state = w["candidate_selector.hidden_projection"] @ hidden[self.spec.first + j]
            state = state * w["candidate_selector.predecessor_codebook"][previous]
            return logits[j][ids] + w["candidate_selector.successor_codebook"][ids] @ state, ids
        ids = torch.arange(self.spec.vocab) if self.ids is None else self.ids
        if isinstance(chooser, PreviousToken):
            bias = w["markov_head.markov_w2"] @ w["markov_head.markov_w1"][previous]
            return logits[j] + bias, ids
        return logits[j], ids

    def drafts(self, features, token, count, temperature=0.0, noise=None):
        """The first `count` drafts' ids: greedy, or with noise(place, ids) at a temperature."""
        hidden = self.hidden(features, token)
        logits, previous, found = self.logits(hidden), token, []
        for j in range(count):
            scores, ids = self.scores(hidden, logits, j, previous)
            if noise is not None:
                scores = scores / temperature + noise(len(features) + 1 + j, ids)
            previous = int(ids[scores.argmax()])
            found.append(previous)
        return found

    def confidence(self, hidden, previous):
        """Before the sigmoid [K], behind the tokens previous [K]."""
        read = torch.cat([hidden[self.spec.first :], self.w["markov_head.markov_w1"][previous]], 1)
        return read @ self.w["confidence_head.proj"][0] + self.w["confidence_head.proj.bias"]
