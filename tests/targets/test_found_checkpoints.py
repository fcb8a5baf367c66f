"""Checkpoints as people have them: repacked, padded, with a head of their own, or in a form that is
refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafters.assistant.find import lies_by, published
from specdec.core.errors import UserError
from specdec.core.types import Sequence
from targets import hub
from targets.arch import released
from targets.checkpoint import Checkpoint
from targets.cuda.load import CudaOptions, load_target as load_cuda
from targets.jax.load import JaxOptions, load_target
from targets.model_folder import read_arch
from targets.published import SIZES
from targets.shards import open_shards
from targets.stored import dequantise
from targets.tokenizer import load_tokenizer
from tests.support.tiny import PREFIX, VOCAB, write_tiny

pytestmark = pytest.mark.usefixtures("cheap_programs")

TABLE = f"{PREFIX}embed_tokens.weight"


def edit(path: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    (shard,) = open_shards(path)
    tensors = {name: np.array(shard.read(name)) for name in shard.names}
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def configure(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def chosen(path: Path, backend: str = "jax", suppress: tuple[int, ...] = ()) -> list[int]:
    """What a target chooses after a prompt, and after each of some drafted tokens."""
    if backend == "jax":
        target: Any = load_target(path, JaxOptions(1, 64, dtype="float32"), suppress)
    else:
        target = load_cuda(path, CudaOptions(1, 64, device="cpu"), suppress)
    seq = Sequence([2, 17, 40, 5])
    seq.slot = 0
    step = target.prefill(seq, 0, 4)
    seq.tokens.append(int(np.asarray(step.chosen)[0, 0]))
    drafted = np.array([[9, 30, 55, 71]], np.int32)
    return [seq.tokens[4], *np.asarray(target.verify([seq], drafted).chosen)[0].tolist()]


def refused(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_target(path, JaxOptions(max_len=64))
    message = str(refusal.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("backend", ["jax", "cuda"])
@pytest.mark.parametrize("name", ["lm_head.weight", "language_model.lm_head.weight"])
def test_a_head_of_its_own_makes_the_logits(tmp_path, backend, name):
    write_tiny(tmp_path, "31b")
    tied = chosen(tmp_path, backend)
    edit(tmp_path, lambda t: t.update({name: np.roll(t[TABLE], 1, 0)}))
    arch = read_arch(tmp_path)
    assert arch.own_head and chosen(tmp_path, backend) != tied
    edit(tmp_path, lambda t: t.update({name: t[TABLE]}))
    assert not read_arch(tmp_path).own_head and chosen(tmp_path, backend) == tied
    stored = Checkpoint(tmp_path, arch).read("lm_head")
    np.testing.assert_array_equal(
        dequantise(stored), load_file(tmp_path / "model.safetensors")[TABLE]
    )


def test_an_untied_config_needs_its_head(tmp_path):
    write_tiny(tmp_path, "31b")
    configure(tmp_path, lambda c: text_part(c).update(tie_word_embeddings=False))
    refused(tmp_path, "tie_word_embeddings", "lm_head.weight")
    edit(tmp_path, lambda t: t.update({"lm_head.weight": np.roll(t[TABLE], 1, 0)}))
    assert read_arch(tmp_path).own_head and chosen(tmp_path)


@pytest.mark.parametrize("backend", ["jax", "cuda"])
@pytest.mark.parametrize("part", ["embed_tokens", "embed_tokens_per_layer"])
def test_tables_in_eight_bits_run_as_their_values(tmp_path, backend, part):
    for folder in (tmp_path / "wide", tmp_path / "fp8"):
        write_tiny(folder, "e4b")
    name = f"{PREFIX}{part}"

    def narrow(tensors: dict[str, np.ndarray]) -> None:
        wide = tensors[f"{name}.weight"].astype(np.float32)
        scale = np.abs(wide).max(-1, keepdims=True) / 448
        values = (wide / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale": scale.astype(np.float32)}

    edit(tmp_path / "fp8", narrow)
    stored = load_fp8(tmp_path / "fp8", part)
    edit(tmp_path / "wide", lambda t: t.update({f"{name}.weight": stored}))
    assert chosen(tmp_path / "fp8", backend) == chosen(tmp_path / "wide", backend)


def load_fp8(path: Path, part: str) -> np.ndarray:
    return dequantise(Checkpoint(path, read_arch(path)).read(part))


def test_what_cannot_matter_is_ignored_and_nothing_else(tmp_path):
    write_tiny(tmp_path, "31b")
    plain = chosen(tmp_path)
    one = np.ones(1, np.float32)
    attention = f"{PREFIX}layers.1.self_attn."
    names = ("k_scale", "v_scale", "q_scale", "k_proj.k_scale", "v_proj.v_scale")
    edit(tmp_path, lambda t: t.update({attention + name: one for name in names}))
    edit(tmp_path, lambda t: t.update({f"{attention}rotary_emb.inv_freq": one}))
    assert chosen(tmp_path) == plain
    edit(tmp_path, lambda t: t.update({f"{attention}k_bias": one}))
    refused(tmp_path, "unused", "k_bias")


def test_values_that_are_the_keys_may_be_stored_twice(tmp_path):
    write_tiny(tmp_path, "31b")
    plain, layer = chosen(tmp_path), global_layer(tmp_path)
    names = [f"{PREFIX}layers.{layer}.self_attn.{part}_proj.weight" for part in "kv"]
    edit(tmp_path, lambda t: t.update({names[1]: t[names[0]]}))
    assert chosen(tmp_path) == plain
    edit(tmp_path, lambda t: t.update({names[1]: t[names[0]] + 1}))
    refused(tmp_path, "v_proj differs", "attention_k_eq_v")


def global_layer(path: Path) -> int:
    layers = read_arch(path).layers
    return next(i for i, layer in enumerate(layers) if layer.k_eq_v)


@pytest.mark.parametrize("storage", ["bfloat16", "fp8"])
def test_experts_by_their_older_names(tmp_path, storage):
    write_tiny(tmp_path, "26b-a4b", storage)
    plain = chosen(tmp_path)

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name.replace(".experts.", ".moe.experts.")] = tensors.pop(name)

    edit(tmp_path, rename)
    assert chosen(tmp_path) == plain


def test_ids_beyond_the_tokenizer_are_never_chosen(tmp_path, mini_folder):
    write_tiny(tmp_path, "31b")
    plain = chosen(tmp_path)

    def pad(tensors: dict[str, np.ndarray]) -> None:
        more = 9 * np.repeat(tensors[TABLE][plain[:1]], 64, 0)  # likelier than what was chosen
        tensors[TABLE] = np.concatenate([tensors[TABLE], more])

    edit(tmp_path, pad)
    configure(tmp_path, lambda c: text_part(c).update(vocab_size=VOCAB + 64))
    assert max(chosen(tmp_path)) >= VOCAB
    assert chosen(tmp_path, suppress=tuple(range(VOCAB, VOCAB + 64))) == plain
    size = load_tokenizer(mini_folder).vocab_size
    padded = load_tokenizer(mini_folder, size + 64)
    assert set(range(size, size + 64)) <= set(padded.suppress_ids)
    assert (padded.vocab_size, padded.model_vocab_size) == (size, size + 64)


@pytest.fixture
def mini_folder() -> Path:
    from targets import mini

    return mini.path("mini")


def test_the_whole_file_goes_before_a_stale_index(tmp_path):
    write_tiny(tmp_path, "31b")
    plain = chosen(tmp_path)
    index = {"weight_map": {TABLE: "model-00001-of-00009.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert chosen(tmp_path) == plain


def test_a_template_of_a_processor(tmp_path, mini_folder):
    for file in mini_folder.iterdir():
        if file.suffix in (".json", ".jinja"):
            (tmp_path / file.name).write_text(file.read_text())
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    chat = [{"role": "user", "content": "x"}]
    assert load_tokenizer(tmp_path).render(chat) == load_tokenizer(mini_folder).render(chat)


UNREAD: dict[str, tuple[dict[str, np.ndarray], dict[str, Any]]] = {
    "bitsandbytes": (
        {f"{PREFIX}layers.0.mlp.up_proj.weight.absmax": np.ones(4, np.float32)},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "MLX": ({f"{PREFIX}layers.0.mlp.up_proj.scales": np.ones((4, 4), np.float32)}, {}),
    "GPTQ": ({f"{PREFIX}layers.0.mlp.up_proj.qweight": np.ones((4, 4), np.int32)}, {}),
    "packed embedding": (
        {f"{PREFIX}embed_tokens.weight_packed": np.ones((4, 4), np.int32)},
        {"quant_method": "compressed-tensors"},
    ),
    "2 bits": (
        {},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"num_bits": 2}}, "b": {"weights": {"num_bits": 8}}},
        },
    ),
}


@pytest.mark.parametrize("scheme", UNREAD)
def test_a_scheme_that_is_not_read_is_named_first(tmp_path, scheme):
    write_tiny(tmp_path, "31b")
    tensors, quantization = UNREAD[scheme]
    edit(tmp_path, lambda t: t.update(tensors))
    configure(tmp_path, lambda c: c.update(quantization_config=quantization))
    refused(tmp_path, scheme, "does not read", "choose")


def test_rotary_scaling_of_older_models_is_refused(tmp_path):
    write_tiny(tmp_path, "31b")
    scaling = {"rope_type": "linear", "factor": 8.0}
    configure(tmp_path, lambda c: text_part(c).update(rope_scaling=scaling))
    refused(tmp_path, "rope_scaling")


@pytest.mark.parametrize(
    ("size", "instead"),
    [("E4B", "google/gemma-4-E4B-it-qat-w4a16-ct"), ("26B-A4B", "unquantized with --dtype int4")],
)
def test_gguf_is_refused_with_what_to_take_instead(tmp_path, size, instead):
    folder = tmp_path / f"gemma-4-{size}-it-GGUF"
    folder.mkdir()
    file = folder / f"gemma-4-{size}-it-Q4_0.gguf"
    file.write_bytes(b"GGUF")
    for name in (str(folder), str(file), file.name, f"some/{file.name}"):
        with pytest.raises(UserError, match=rf"GGUF.*{instead}"):
            hub.folder_of(name, "absent")
    with pytest.raises(UserError, match=rf"GGUF.*{instead}"):
        hub._check_weights(f"org/gemma-4-{size}-it-GGUF", [file.name])


def test_assistants_are_found_by_architecture_before_the_name(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "is_kept", lambda name: False)
    for known, size in SIZES.items():
        folder = tmp_path / known.replace("gemma-4", "repacked")
        folder.mkdir()
        file = Path(released.__code__.co_filename).parent / "released" / f"{known}.json"
        (folder / "config.json").write_text(file.read_text())
        assert published(str(folder)) == f"google/gemma-4-{size}-it-assistant"
        assert not lies_by(str(folder))
        for name in (f"RedHatAI/gemma-4-{size}-it-FP8-Dynamic", f"x/Gemma-4-{size.lower()}-w4a16"):
            assert published(name) == f"google/gemma-4-{size}-it-assistant"
        qat = f"google/gemma-4-{size}-it-qat-q4_0-unquantized-assistant"
        assert published(f"google/gemma-4-{size}-it-qat-w4a16-ct") == qat
        monkeypatch.setattr(hub, "is_kept", lambda name, own=qat: name == own)
        assert lies_by(f"google/gemma-4-{size}-it-qat-w4a16-ct") and not lies_by(str(folder))
    assert published("org/another-model") is published("mini") is None
