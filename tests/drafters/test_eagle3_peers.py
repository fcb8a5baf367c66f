"""Our exported heads in the peers' own classes: the same logits for k = 0, 1, 2, the same loss and
the same gradients.

The peers pin older libraries, so they are no dependency; see CONTRIBUTING.md for how to run this.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from drafters.eagle3.files import save_flat, save_speculators
from drafters.eagle3.jax.head import place
from tests.support.eagle3_heads import unrolled_logits
from tests.support.eagle3_oracle import FLAGS, SPEC, STEPS, TOKENS, random_head
from tests.support.verifier import write_verifier
from training.packing import PackedRows
from training.teacher import TeacherOutput
from training.unroll import judge, loss_of

TOLERANCE = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore")
SPECFORGE_FLAGS = [{}, {"fc_norm": True}]
"""It has no other ones, and means by norm_output what no engine serves (eagle3.md, finding 7)."""


def text(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids [TOKENS + STEPS], an embedding table, features [TOKENS, F]."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, SPEC.vocab, TOKENS + STEPS)
    table = random.standard_normal((SPEC.vocab, SPEC.hidden)).astype(np.float32)
    return ids, table, random.standard_normal((TOKENS, SPEC.features)).astype(np.float32)


def ours(head, ids, table, features) -> np.ndarray:
    documents = np.zeros(TOKENS, np.int32)
    return np.stack(unrolled_logits(head, np.asarray(table[ids]), jnp.asarray(features), documents))


@pytest.mark.parametrize("flags", SPECFORGE_FLAGS, ids=str)
def test_specforge_computes_the_same_logits(tmp_path, flags) -> None:
    peer = pytest.importorskip("specforge.modeling.draft.llama3_eagle")
    from safetensors.torch import load_file
    from transformers import LlamaConfig

    head, (ids, table, features) = random_head(**flags), text()
    save_flat(head, tmp_path, (1,), "float32", embedding=table)
    config = LlamaConfig(**json.loads((tmp_path / "config.json").read_text()))
    model = peer.LlamaForCausalLMEagle3(config, attention_backend="sdpa").eval()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    expected, cache = [], [[], []]
    with torch.no_grad():
        hidden = model.project_hidden_states(torch.tensor(features)[None])
        mask = torch.ones(1, TOKENS, dtype=torch.bool)
        mask = model.prepare_decoder_attention_mask(mask, hidden, 1, TOKENS, 0)
        for n in range(STEPS):
            hidden = model.backbone(
                input_embeds=model.embed_input_ids(torch.tensor(ids[None, n : n + TOKENS])),
                hidden_states=hidden,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(TOKENS)[None],
                past_key_values=None,
                use_cache=True,
            )
            expected.append(model.compute_logits(hidden)[0].numpy())
    worst = np.abs(np.stack(expected) - ours(head, ids, table, features)).max((1, 2))
    print(f"specforge {flags}: {worst}")
    assert worst.max() < TOLERANCE


def in_speculators(head, table, folder):
    """The exported head as speculators' own class."""
    speculators = pytest.importorskip("speculators")
    write_verifier(folder / "target", table)
    out = folder / "head"
    save_speculators(head, out, (1,), folder / "target", table, 3, "float32")
    config = json.loads((out / "config.json").read_text())
    config["transformer_layer_config"]["_attn_implementation"] = "eager"  # flex needs a GPU
    (out / "config.json").write_text(json.dumps(config))
    return speculators.SpeculatorModel.from_pretrained(str(out)).float().eval()


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_speculators_computes_the_same_logits(tmp_path, flags) -> None:
    head, (ids, table, features) = random_head(**flags), text()
    model = in_speculators(head, table, tmp_path)
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, result: seen.append(result.detach()))
    with torch.no_grad():
        model(
            hidden_states=torch.tensor(features)[None],
            input_ids=torch.tensor(ids[None, :TOKENS]),
            document_ids=torch.zeros(1, TOKENS, dtype=torch.long),
            ttt_steps=STEPS,
        )
    own = ours(head, ids, table, features)
    # the peer's unroll ends with the text: row i of step n is fed token i + n
    worst = [
        np.abs(seen[n][0, : TOKENS - n].numpy() - own[n, : TOKENS - n]).max() for n in range(STEPS)
    ]
    print(f"speculators {flags}: {worst}")
    assert max(worst) < TOLERANCE


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_speculators_has_the_same_loss_and_gradients(tmp_path, flags) -> None:
    """Every token counts, no soft-cap, all favourites in the draft vocabulary: what it lacks."""
    head, (ids, table, features) = random_head(**flags), text()
    model, ids = in_speculators(head, table, tmp_path), ids[: TOKENS + 1]
    from speculators.losses.utils import resolve_loss_config

    states = np.random.default_rng(1).standard_normal((TOKENS + 1, SPEC.hidden)).astype(np.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("verifier" not in name and "embed" not in name)
    _, loss, _ = model(
        hidden_states=torch.tensor(features)[None],
        input_ids=torch.tensor(ids[None, 1:]),
        document_ids=torch.zeros(1, TOKENS, dtype=torch.long),
        loss_mask=torch.ones(1, TOKENS, dtype=torch.bool),
        verifier_last_hidden_states=torch.tensor(states[None, 1:]),
        ttt_steps=STEPS,
        ttt_step_loss_decay=DECAY,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    loss.backward()
    own, gradients = our_loss(head, ids, table, features, states)
    print(f"speculators {flags}: loss {loss.item()}, ours {own}")
    assert abs(loss.item() - own) < TOLERANCE * own
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        found = theirs[SPECULATORS.get(name, f"layers.0.{name}") + ".weight"].numpy()
        worst = np.abs(found - gradient).max() / np.abs(gradient).max()
        assert worst < 10 * TOLERANCE, (name, worst)


DECAY = 0.8
SPECULATORS = {name: name for name in ("fc", "norm", "lm_head", "input_norm")}
SPECULATORS |= {f"fc_norm.{i}": f"fc_norm.{i}" for i in range(3)}
"""Names that are not of the layer."""


def our_loss(head, ids, table, features, states) -> tuple[float, dict[str, np.ndarray]]:
    """Of the text as one document. states [TOKENS + 1, H]: before the target's final norm."""
    weights, chosen = place(head, jnp.float32)
    normed = states / np.sqrt((states**2).mean(-1, keepdims=True) + SPEC.eps)
    logits = jnp.asarray(normed @ table[np.asarray(head.target_ids)].T)[None]
    best = chosen[logits.argmax(-1)]
    padded = np.concatenate([features, np.zeros_like(features[:1])])
    lesson = TeacherOutput(jnp.asarray(padded)[None], logits, jax.nn.logsumexp(logits, -1), best)
    one = np.ones((1, TOKENS + 1), bool)
    rows = PackedRows(ids[None].astype(np.int32), np.zeros_like(one, np.int32), one, ~one)

    def loss(weights):
        judged = judge(weights, head.spec, jnp.asarray(table), chosen, rows, lesson, STEPS)
        return loss_of(judged, DECAY)

    value, gradients = jax.value_and_grad(loss)(weights)
    return float(value), {name: np.asarray(gradient) for name, gradient in gradients.items()}
