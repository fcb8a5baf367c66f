"""Finding an assistant and reading it: strict both ways, each mistake one line, and the command
line's ways to name it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

from drafters import registry
from drafters.assistant.files import load_assistant, suppressed
from drafters.assistant.find import nearby
from drafters.assistant.kind import KIND
from drafters.assistant.spec import random_assistant, released_size, tensors
from drafters.kind import DraftRequest
from specdec.core.config import ModelConfig
from specdec.core.errors import UserError
from targets import hub
from targets.arch import released
from targets.model_folder import read_arch
from targets.tokenizer import load_tokenizer
from tests.support.assistants import assistant_config, write_assistant
from tests.support.commands import CUDA, refused, run
from tests.support.hub_server import hub_of
from tests.support.tiny import VARIANTS
from tests.support.worded import LAYERS, WORDS

pytestmark = pytest.mark.usefixtures("cheap_programs")

BASE = ["generate", "def f(", "--max-tokens", "8", "--slots", "1", "--max-len", "64", "--k", "3"]


@pytest.fixture
def pair(worded, tmp_path, monkeypatch) -> Path:
    """A tiny model with mini's tokenizer, and its assistant beside it."""
    monkeypatch.setitem(VARIANTS["31b"], "layer_types", LAYERS * 2)
    monkeypatch.setitem(VARIANTS["31b"], "vocab_size", WORDS)
    shutil.copytree(worded, tmp_path / "tiny")
    write_assistant(tmp_path / "tiny-assistant", "31b")
    return tmp_path / "tiny"


def beside(model: Path) -> Path:
    return model.parent / "tiny-assistant"


def rewrite(model: Path, change) -> None:
    """change: of the assistant's tensors, a dict."""
    file = beside(model) / "model.safetensors"
    stored = load_file(file)
    change(stored)
    save_file(stored, file)


def drafted(capsys, *arguments) -> dict:
    out, _ = run(capsys, *BASE, "--json", *arguments)
    return json.loads(out.splitlines()[-1])


def test_is_found_beside_or_in_the_models_folder(pair, capsys):
    assert nearby(pair) == beside(pair)
    beside(pair).rename(pair / "assistant")
    assert nearby(pair) == pair / "assistant"
    alias = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    document = drafted(capsys, "--model", str(pair), "--speculative-config", alias)
    assert document["drafted"] > 0
    assert document["config"]["speculation"]["drafter"] == "assistant"


def test_auto_takes_what_lies_by_the_model_unless_told_not_to(pair, capsys):
    def chosen(**own):
        return registry.resolved(registry.config_type()(**own), ModelConfig(model=str(pair)))

    found = chosen()
    assert (found.drafter, found.auto_with) == ("auto", "assistant")
    assert found.draft_model == str(beside(pair))
    assert chosen(auto_with="none").draft_model is None
    assert chosen(auto_with="model", draft_model="elsewhere").draft_model == "elsewhere"
    embedded = registry.resolved(registry.config_type()(), ModelConfig())
    assert (embedded.auto_with, embedded.draft_model) == ("assistant", "mini-assistant")
    document = drafted(capsys, "--model", str(pair))
    assert document["config"]["speculation"]["auto_with"] == "assistant"
    assert document["text"] == drafted(capsys, "--model", str(pair), "--drafter", "none")["text"]
    shutil.rmtree(beside(pair))
    assert chosen().auto_with is None


def test_options_change_the_draft_alone(pair, capsys):
    text = pair.parent / "words.txt"
    text.write_text("def f(x):\n    return x\n" * 9)
    same = ["--model", str(pair), "--int8", "--temperature", "0.7"]
    own = ["--draft-position", "last", "--draft-vocab", "300", "--draft-vocab-text", str(text)]
    document = drafted(capsys, *same, "--drafter", "assistant", *own)
    assert document["drafted"] > 0
    assert document["text"] == drafted(capsys, *same, "--drafter", "none")["text"]
    same = ["--model", str(pair), *CUDA]
    document = drafted(capsys, *same, "--drafter", "assistant", "--draft-vocab", "300")
    assert document["drafted"] > 0


def test_the_hub_is_asked_only_for_an_assistant(pair, tmp_path, monkeypatch):
    """Under the model's name with -assistant, where `--drafter assistant` was typed."""
    repos = {
        "org/tiny": {f.name: f.read_bytes() for f in pair.iterdir()},
        "org/tiny-assistant": {f.name: f.read_bytes() for f in beside(pair).iterdir()},
    }
    with hub_of(repos) as made:
        template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub.fetched.cache_clear()
        for drafter in ("auto", "ngram", "assistant"):
            asked = registry.config_type()(drafter=drafter)
            speculation = registry.resolved(asked, ModelConfig(model="org/tiny@main"))
            assert not made.asked
        assert speculation.draft_model == "org/tiny-assistant"
        tokenizer = load_tokenizer(pair, WORDS)
        draft = KIND.read(DraftRequest(read_arch(pair), tokenizer, speculation))
        assert draft.features == (3,)
        paths = [path for _, path, _ in made.asked if "org/" in path]
        assert paths and all("org/tiny-assistant" in path for path in paths)
    hub.fetched.cache_clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.layer_scalar"), "lacks tensors: model.layers.2.layer_sc"),
        (lambda t: t.pop("pre_projection.weight"), "lacks tensors: pre_projection.weight"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": t["model.norm.weight"]}),
            "unused tensors: model.layers.0.self_attn.k_proj",
        ),
        (
            lambda t: t.update(
                {"pre_projection.weight": t["pre_projection.weight"][:, :-1].copy()}
            ),
            "has shape [32, 95]",
        ),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"] * np.nan}), "NaN"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(np.int8)}),
            "is I8",
        ),
    ],
)
def test_damaged_weights_are_one_line(pair, capsys, change, message):
    rewrite(pair, change)
    assert message in refused(capsys, *BASE, "--drafter", "assistant", "--model", str(pair))


@pytest.mark.parametrize(
    ("change", "text", "message"),
    [
        ({"backbone_hidden_size": 96}, {}, "width 96, not 48"),
        ({}, {"vocab_size": 400}, "vocabulary of 400, not 4096"),
        ({}, {"sliding_window": 16}, "window 16, but layer 2"),
        ({}, {"head_dim": 24}, "head_dim 24, but layer 2"),
        ({}, {"num_key_value_heads": 2}, "kv_heads 2, but layer 2"),
        ({}, {"num_kv_shared_layers": 2}, "keys and values of their own"),
        ({}, {"enable_moe_block": True}, "enable_moe_block"),
        ({"model_type": "gemma4"}, {}, "is no Gemma 4 assistant"),
        ({"backbone_hidden_size": None}, {}, "lacks or misstates"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, {}, "do not divide into 7"),
    ],
)
def test_another_models_assistant_is_one_line(pair, capsys, change, text, message):
    config = assistant_config("31b", **change)
    config["text_config"] |= text
    (beside(pair) / "config.json").write_text(json.dumps(config))
    assert message in refused(capsys, *BASE, "--drafter", "assistant", "--model", str(pair))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft-position", "first"], "next or last"),
        (["--draft-vocab", "-1"], "0 (all words) or more"),
        (["--draft-vocab", "1"], "must be"),
        (["--draft-vocab", "9000"], "to 4096, got 9000"),
        (["--draft-vocab-text", "x"], "set how many"),
        (["--draft-vocab", "300", "--draft-vocab-text", "/nowhere"], "cannot read /nowhere"),
        (["--draft-model", "/nowhere"], "no folder /nowhere"),
    ],
)
def test_mistyped_options_are_one_line(pair, capsys, options, message):
    given = [*BASE, "--drafter", "assistant", "--model", str(pair), *options]
    assert message in refused(capsys, *given)


def test_a_model_without_an_assistant_says_where_it_was_looked_for(worded, capsys):
    said = refused(capsys, *BASE, "--drafter", "assistant", "--model", str(worded))
    assert "no assistant in or beside" in said and "tiny-assistant" in said


def test_an_untied_head_is_read_from_its_own_tensor(pair):
    config = assistant_config("31b", tie_word_embeddings=False)
    (beside(pair) / "config.json").write_text(json.dumps(config))
    own = np.full((WORDS, 32), 0.5, ml_dtypes.bfloat16)
    rewrite(pair, lambda t: t.update({"lm_head.weight": own}))
    assistant = load_assistant(beside(pair), read_arch(pair))
    assert (assistant.weights["head"] == own).all()


def test_words_that_the_assistant_suppresses_are_never_guessed(pair):
    """As 12B's assistant does by its generation_config.json; tokens that the target suppresses are
    barred already."""
    (beside(pair) / "generation_config.json").write_text('{"suppress_tokens": [7, 9]}')
    assert suppressed(beside(pair), WORDS) == (7, 9)
    speculation = registry.config_type()(drafter="assistant", draft_model=str(beside(pair)))
    draft = KIND.read(DraftRequest(read_arch(pair), load_tokenizer(pair, WORDS), speculation))
    assert draft.assistant.target_ids.tolist() == [i for i in range(WORDS) if i not in (7, 9)]
    (beside(pair) / "generation_config.json").write_text('{"suppress_tokens": [9000]}')
    with pytest.raises(UserError, match="token ids from 0 to 4095"):
        suppressed(beside(pair), WORDS)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gemma-4-31b", 469),
        ("gemma-4-12b", 422),
        ("gemma-4-26b-a4b", 419),
        ("gemma-4-e4b", 78),
        ("gemma-4-e2b", 78),
    ],
)
def test_random_ones_have_the_released_sizes(name, millions):
    spec = released_size(released(name))
    count = sum(np.prod(t.shape) for n, t in tensors(spec).items() if n != "token_ordering")
    assert round(count / 1e6) == pytest.approx(millions, abs=1)
    assert [layer.kv_from for layer in spec.arch.layers][2:] == {
        "gemma-4-31b": [58, 59],
        "gemma-4-12b": [46, 47],
        "gemma-4-26b-a4b": [28, 29],
        "gemma-4-e4b": [22, 23],
        "gemma-4-e2b": [13, 14],
    }[name]
    if spec.clusters:
        assert len(random_assistant(spec).weights["token_ordering"]) == 262144
