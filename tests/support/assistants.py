"""Random assistants for the tiny models, in transformers' form, and transformers' own as oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence as Seqs
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from drafters.assistant.config_json import parse_config
from drafters.assistant.files import file_name, load_assistant
from drafters.assistant.spec import Assistant, paired, tensors
from specdec.core.types import Sequence, Step
from targets.arch import parse_arch
from targets.model_folder import read_arch
from tests.support.tiny import VOCAB, config_of, oracle, random_tensors

ORDERED = ("e2b", "e4b")
CLUSTERS = {"num_centroids": 16, "centroid_intermediate_top_k": 5}
STEPS = 4
TOLERANCE = 5e-4


def assistant_config(variant: str, **change: Any) -> dict[str, Any]:
    """config.json of an assistant for the tiny model of this variant."""
    target = config_of(variant)["text_config"]
    text = target | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    }
    unified = target["model_type"] == "gemma4_unified_text"
    return {
        "model_type": "gemma4_unified_assistant" if unified else "gemma4_assistant",
        "text_config": text,
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": variant in ORDERED,
        **CLUSTERS,
        "tie_word_embeddings": True,
    } | change


def read_all_but_the_last(target: Any, texts: Seqs[list[int]]) -> Iterator[tuple[int, Step]]:
    """Feed each slot its text without the last token, then a draft that is rejected, so that the
    cache has stale entries after each text. Yields (slot, step); `step` has the states that the
    assistant starts from in its first row."""
    chunk = target.prefill_chunk
    for slot, text in enumerate(texts):
        seq = Sequence(text[:-2], slot=slot)
        for start in range(0, seq.prompt_len, chunk):
            target.prefill(seq, start, min(start + chunk, seq.prompt_len))
        seq.tokens.append(text[-2])
        yield slot, target.verify([seq], np.array([[9, 3, 7, 1]]))


def random_weights(variant: str, seed: int = 5) -> dict[str, np.ndarray]:
    """float32 by the engine's names, each value exactly representable in bfloat16."""
    random = np.random.default_rng(seed)
    arch = parse_arch(config_of(variant))
    table = tensors(paired(parse_config(assistant_config(variant)), arch))

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "token_ordering":
            return random.permutation(*shape)
        noise = random.standard_normal(shape).astype(np.float32)
        near = 0.8 + 0.1 * noise if name.endswith("layer_scalar") else 1 + 0.2 * noise
        value = near if len(shape) == 1 else noise * np.float32(shape[-1] ** -0.5)
        return value.astype(ml_dtypes.bfloat16).astype(np.float32)

    return {name: draw(name, tensor.shape) for name, tensor in table.items()}


def write_assistant(path: Path, variant: str, change: dict[str, Any] | None = None) -> None:
    """change: of config.json, at its top."""
    arch = parse_arch(config_of(variant))
    spec = paired(parse_config(assistant_config(variant)), arch)
    files = {
        file_name(spec, name): value
        if value.dtype == np.int64
        else value.astype(ml_dtypes.bfloat16)
        for name, value in random_weights(variant).items()
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(assistant_config(variant, **(change or {}))))
    save_file(files, path / "model.safetensors")


@cache
def assistant_for(path: Path, variant: str) -> Assistant:
    """An assistant for the tiny model in that folder, written to a folder beside it."""
    folder = path.parent / f"{path.name}-assistant"
    if not folder.exists():
        write_assistant(folder, variant)
    return load_assistant(folder, read_arch(path))


@contextmanager
def all_reuse(kind: type) -> Iterator[None]:
    """transformers 5.23.0 refuses its own assistants: no layer of theirs stores what it reads."""
    with pytest.MonkeyPatch.context() as patch:
        reuse = property(lambda config: ["reuse"] * config.num_hidden_layers)
        patch.setattr(kind, "kv_sharing_modes", reuse)
        yield


def read_by_transformers(path: Path) -> Any:
    """An assistant's folder as transformers' own class, every tensor used and filled."""
    from transformers import Gemma4AssistantForCausalLM, Gemma4TextConfig

    with all_reuse(Gemma4TextConfig):
        model, report = Gemma4AssistantForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return model


@cache
def oracle_pair(variant: str) -> tuple[Any, Any]:
    """transformers' own target and assistant, float32 and eager."""
    import torch
    from transformers import (
        Gemma4AssistantConfig,
        Gemma4AssistantForCausalLM,
        Gemma4UnifiedAssistantConfig,
        Gemma4UnifiedAssistantForCausalLM,
    )

    config = assistant_config(variant)
    unified = config.pop("model_type") == "gemma4_unified_assistant"
    kinds = (
        (Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM)
        if unified
        else (Gemma4AssistantConfig, Gemma4AssistantForCausalLM)
    )
    text = kinds[0](**config).text_config
    with all_reuse(type(text)):
        model = kinds[1](kinds[0](**config, attn_implementation="eager")).float().eval()
    spec = paired(parse_config(assistant_config(variant)), parse_arch(config_of(variant)))
    state = {file_name(spec, n): torch.tensor(v) for n, v in random_weights(variant).items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    return oracle(variant, random_tensors(variant)), model


class Said:
    """What transformers drafts after a text: states [K, H], logits [K, V] and tokens [K]; of the
    words that are not scored, the logits are those of no word (-inf)."""

    def __init__(self) -> None:
        self.states, self.logits, self.tokens = [], [], []


def settled(variant: str, text: list[int]) -> tuple[Any, Any]:
    """The target's last state [1, 1, H] and the keys and values it lends, of a text but for its
    last token."""
    import torch
    from transformers import DynamicCache

    past = DynamicCache()  # without a config: it keeps all that sliding layers saw
    with torch.no_grad():
        fed = torch.tensor([text[:-1]])
        # by position: what transformers calls a cache differs by version
        out = oracle_pair(variant)[0](fed, None, None, past, output_hidden_states=True)
    config = config_of(variant)["text_config"]
    kinds = config["layer_types"]
    own = kinds[: len(kinds) - config["num_kv_shared_layers"]]
    last = {kind: i for i, kind in enumerate(own)}
    lent = {kind: (past.layers[i].keys, past.layers[i].values) for kind, i in last.items()}
    return out.hidden_states[-1][:, -1:], lent


def chain(
    variant: str,
    text: list[int],
    count: int,
    ahead: int = 1,
    choose: Any = lambda logits, j: int(logits.argmax()),
    lent: Any = None,
) -> Said:
    """transformers' guesses after a text; its last token is not fed yet. choose(logits [V], j):
    guess j. lent: (state, keys and values) to use in place of the target's."""
    import torch

    target, model = oracle_pair(variant)
    state, shared = settled(variant, text) if lent is None else lent
    steps, token, window = Said(), text[-1], config_of(variant)["text_config"]["sliding_window"]
    if not ahead:  # as vLLM: the window ends at the last key
        near = tuple(part[:, :, -window:] for part in shared["sliding_attention"])
        shared = {**shared, "sliding_attention": near}
    for j in range(count):
        with torch.no_grad():
            embedded = target.get_input_embeddings()(torch.tensor([[token]]))
            out = model(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(text) - 2 + ahead]]),
                attention_mask=None,
                shared_kv_states=shared,
            )
        state, logits = out.last_hidden_state, out.logits[0, 0].numpy()
        if variant in ORDERED:
            logits = np.where(logits > logits.min(), logits, -np.inf)
        token = choose(logits, j)
        steps.states.append(state[0, 0].numpy())
        steps.logits.append(logits)
        steps.tokens.append(token)
    return steps


def a_text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
