"""How the embedded models were made, in small: clean split, exact resume, faithful export."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch

from recipes.mini import corpus as source
from recipes.mini.baselines import CountModel
from recipes.mini.corpus import Package, collect, fault, is_heldout
from recipes.mini.export import write_checkpoint
from recipes.mini.licences import permissive_licence
from recipes.mini.mini_tokenizer import train_tokenizer, write_tokenizer
from recipes.mini.similarity import LeakScan, evaluation_texts
from specdec.core.errors import UserError
from targets import mini
from targets.arch import Arch, parse_arch
from targets.checkpoint import Checkpoint
from targets.jax.blank_params import init_params
from targets.jax.model import sequence_logits
from targets.jax.params import Params, load_params
from targets.model_folder import read_arch
from targets.tokenizer import load_tokenizer
from tests.support.places import ROOT
from training.blocks import block_logits
from training.chats import chats_of
from training.heldout import heldout_nats, make_scorer, summarise, windows_of
from training.optimizer import OptimizerConfig
from training.pretrain import Phase, PretrainConfig, Pretrainer, read_config_file
from training.tokens import encode_stream, row_starts, training_texts

pytestmark = pytest.mark.usefixtures("cheap_programs")

TOLERANCE = 5e-4
RECIPES = ROOT / "configs"
FUNCTION = '''
def scale_{0}(values, factor_{0}):
    """Multiply each of the values by factor number {0}."""
    result_{0} = []
    for value in values:
        result_{0}.append(value * factor_{0} + {0})
    return result_{0}
'''


def python_file(number: int, functions: int = 6) -> str:
    return "import math\n" + "\n".join(FUNCTION.format(number * 100 + i) for i in range(functions))


# --- the corpus -----------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """80 different files, then copies of them: equal, with another layout, and nearly equal."""
    files = []
    for number in range(80):
        text = python_file(number)
        layout = "# a comment\n" + text.replace("    ", "  ").replace("math\n", "math  # why\n")
        variants = [text, text, layout, text + "\nEXTRA = 12345\n"]
        for kind, variant in enumerate(variants):
            path = tmp_path / f"{kind}_{number:02d}.py"
            path.write_text(variant)
            files.append(path)
    return Package("made", "1", "MIT", tuple(sorted(files)))


def test_split_is_deterministic_and_nothing_crosses(package, monkeypatch) -> None:
    monkeypatch.setattr(source, "HELDOUT_PERMILLE", 300)
    train, heldout, counts = collect([package], LeakScan([]))
    again = collect([package], LeakScan([]), workers=2)
    assert [d.key for d in train] == [d.key for d in again[0]]
    assert [d.key for d in heldout] == [d.key for d in again[1]]
    assert len(train) + len(heldout) == 80
    assert counts["dropped"] == {"equal": 160, "nearly equal": 80}
    assert 8 <= len(heldout) <= 40
    assert not {d.key for d in train} & {d.key for d in heldout}
    reverse = Package("made", "1", "MIT", package.files[:80][::-1])
    assert {d.key for d in collect([reverse], LeakScan([]))[1]} == {d.key for d in heldout}
    assert all(is_heldout(d.key) for d in heldout)


def test_evaluation_text_is_kept_out(tmp_path: Path) -> None:
    solution = FUNCTION.format(7)
    (tmp_path / "set.jsonl").write_text(
        json.dumps({"prompt": solution, "canonical_solution": "    pass\n"}) + "\n"
    )
    scan = LeakScan(evaluation_texts([tmp_path / "set.jsonl"]))
    quoted = 'TEXT = """' + "\n".join(solution.splitlines()[3:]) + '"""\n'
    assert scan.leaks("x = 1\n" * 30 + quoted)  # a passage inside another text
    assert scan.leaks("def scale_7_longer_name(): pass\n# for HumanEval")
    assert not scan.leaks(python_file(3))
    with pytest.raises(UserError, match=r"missing\.jsonl is missing"):
        evaluation_texts([tmp_path / "missing.jsonl"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\n", "size"),
        ("# This file was automatically generated.\n" + "x = 1\n" * 50, "generated"),
        ("x = '" + "a" * 600 + "'\n" + "y = 2\n" * 50, "long lines"),
        ("print 'python 2'\n" * 20, "not Python 3"),
        ("x = [" + "12345678, " * 40 + "]\n", "table of numbers"),
        (python_file(1), None),
    ],
)
def test_unfit_files_are_named(text: str, reason: str | None) -> None:
    assert fault(text) == reason


@pytest.mark.parametrize(
    ("statement", "licence"),
    [
        ("MIT", "MIT"),
        ("BSD-3-Clause", "BSD"),
        ("Apache Software License | Apache-2.0", "Apache-2.0"),
        ("MPL-2.0 AND MIT", None),
        ("LGPL-2.1-or-later", None),
        ("GNU General Public License v3 (GPLv3)", None),
        ("Apache 2.0 | Other/Proprietary License", None),
        ("", None),
    ],
)
def test_only_permissive_licences_pass(statement: str, licence: str | None) -> None:
    assert permissive_licence(statement) == licence


def test_chats_are_requests_and_the_files_own_code() -> None:
    text = python_file(2)
    chats = chats_of(text, seed=0)
    assert chats == chats_of(text, seed=0) != chats_of(text, seed=1)
    answers = [m["content"] for chat in chats for m in chat if m["role"] == "assistant"]
    assert len(answers) == 6
    assert all(answer in text for answer in answers)
    texts = [python_file(number) for number in range(60)]
    chosen = training_texts(texts, [f"<bos>chat {i}" for i in range(10_000)], seed=0)
    share = sum(len(t) for t in chosen if t.startswith("<bos>chat")) / sum(map(len, chosen))
    assert 0.06 < share < 0.09
    assert chosen == training_texts(texts, [f"<bos>chat {i}" for i in range(10_000)], seed=0)


def test_each_epoch_sees_each_chunk_once() -> None:
    starts = np.concatenate([row_starts(3, step, 4, 10, 410) for step in range(20)])
    first, second = np.sort(starts[:40]), np.sort(starts[40:])
    assert set(np.diff(first)) == set(np.diff(second)) == {10}
    assert not np.array_equal(starts[:40], starts[40:])
    assert starts.min() >= 0 and starts.max() + 10 <= 410


# --- training -------------------------------------------------------------------------------


def toy_config(per_layer: int = 0) -> dict:
    """A 12-layer miniature of an embedded model's own config.json."""
    name = "mini-e" if per_layer else "mini"
    config = json.loads((mini.path(name) / "config.json").read_text())
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "global_head_dim": 16}
    return config | small | {"sliding_window": 16}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a two-layer config.json, tokenizer files and a token stream."""
    folder = tmp_path_factory.mktemp("toy")
    texts = [python_file(number) for number in range(40)]
    backend = train_tokenizer(texts, size=400)
    write_tokenizer(backend, folder)
    two = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = toy_config() | two | {"vocab_size": backend.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config))
    np.save(folder / "train.npy", encode_stream(backend, [f"<bos>{t}<eos>" for t in texts]))
    return folder


def trainer(toy: Path, run: Path) -> Pretrainer:
    optimizer = OptimizerConfig(1e-2, 1e-2, 0.1, 2, 0.5, 0.0, 1.0)
    phases = (Phase(4, 4, 32), Phase(2, 4, 32))
    config = PretrainConfig(str(toy), 1, 3, 100, phases, optimizer)
    backend = tokenizers.Tokenizer.from_file(str(toy / "tokenizer.json"))
    watched = windows_of(backend, [python_file(90)], 32)
    return Pretrainer(config, run, np.load(toy / "train.npy"), watched, jnp.float32)


def test_resume_is_bit_exact(toy: Path, tmp_path: Path) -> None:
    whole = trainer(toy, tmp_path / "whole")
    assert whole.train(6) == 6
    assert trainer(toy, tmp_path / "parts").train(3) == 3
    resumed = trainer(toy, tmp_path / "parts")
    assert int(resumed.state.step) == 3
    assert resumed.train(6) == 6
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    rows = [json.loads(line) for line in (tmp_path / "whole/log.jsonl").read_text().splitlines()]
    losses = [row["heldout"] for row in rows if "heldout" in row]
    assert losses[-1] < losses[0] < np.log(400)
    scalars = [leaf["layer_scalar"] for leaf in whole.state.params.segments[0]]
    assert all(np.all(np.asarray(scalar) == 1) for scalar in scalars)


def test_recipes_parse_and_name_a_wrong_key(tmp_path: Path) -> None:
    for name in ("pretrain-mini", "pretrain-mini-e"):
        recipe = read_config_file(RECIPES / f"{name}.toml")
        assert recipe.steps == sum(phase.steps for phase in recipe.phases)
    wrong = (RECIPES / "pretrain-mini.toml").read_text().replace("seed =", "sede =")
    (tmp_path / "wrong.toml").write_text(wrong)
    with pytest.raises(UserError, match="sede"):
        read_config_file(tmp_path / "wrong.toml")


@pytest.mark.parametrize("per_layer", [0, 8])
def test_blocks_compute_the_targets_own_logits(per_layer: int) -> None:
    arch = parse_arch(toy_config(per_layer))
    params = shrunk(init_params(arch, jax.random.key(0)))
    tokens = jax.random.randint(jax.random.key(1), (2, 80), 0, 4096)
    plain = jax.jit(sequence_logits, static_argnums=1)(params, arch, tokens)
    blocks = jax.jit(block_logits, static_argnums=1)(params, arch, tokens)
    np.testing.assert_allclose(blocks, plain, atol=2e-5)


def shrunk(params: Params) -> Params:
    """Norms and matrices away from their initial values, attention far from saturated."""
    return jax.tree.map(lambda leaf: leaf * 0.5, params)


def test_windows_score_each_token_once(toy: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(toy / "tokenizer.json"))
    texts = [python_file(91), python_file(92, functions=1)]
    windows = windows_of(backend, texts, 32)
    ids = [t for text in texts for t in backend.encode(text, add_special_tokens=False).ids]
    np.testing.assert_array_equal(windows.targets[windows.scored], ids)
    assert (windows.inputs[:, 0] == 2).all()
    arch = read_arch(toy)
    params = init_params(arch, jax.random.key(0))
    nats = heldout_nats(make_scorer(arch, jnp.float32), params, windows)
    first = sequence_logits(params, arch, windows.inputs[:1])[0]
    wanted = -np.asarray(jax.nn.log_softmax(first))[np.arange(32), windows.targets[0]]
    np.testing.assert_allclose(nats[:32], wanted, atol=1e-4)
    loss = summarise(nats, windows.characters)
    assert loss.tokens == len(ids) and loss.characters == sum(map(len, texts))


def test_count_model_is_a_distribution() -> None:
    stream = np.random.default_rng(0).integers(0, 7, 300).astype(np.uint16)
    model = CountModel(stream, 7)
    for order in (1, 3):
        chances = [np.exp(-model.nats(np.array([3, 5, token]), order)[-1]) for token in range(7)]
        assert sum(chances) == pytest.approx(1)


# --- export and the committed models --------------------------------------------------------


def transformers_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


def jax_logits(folder: Path, ids: np.ndarray) -> tuple[np.ndarray, Arch]:
    arch = read_arch(folder)
    params = load_params(Checkpoint(folder, arch), arch, jnp.float32)
    return np.asarray(sequence_logits(params, arch, jnp.asarray(ids))), arch


@pytest.mark.parametrize("per_layer", [0, 8])
def test_export_loads_in_transformers(toy: Path, tmp_path: Path, per_layer: int) -> None:
    architecture = tmp_path / "architecture"
    architecture.mkdir()
    config = toy_config(per_layer) | {"vocab_size": 400}
    config |= {"vocab_size_per_layer_input": 400 if per_layer else 0}
    (architecture / "config.json").write_text(json.dumps(config))
    params = shrunk(init_params(parse_arch(config), jax.random.key(3)))
    write_checkpoint(params, parse_arch(config), architecture, toy, tmp_path / "out")
    ids = np.random.default_rng(0).integers(0, 400, (2, 50))
    ours, _ = jax_logits(tmp_path / "out", ids)
    np.testing.assert_allclose(ours, transformers_logits(tmp_path / "out", ids), atol=TOLERANCE)
    shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("name", mini.NAMES)
def test_embedded_model_is_the_same_in_transformers(name: str) -> None:
    folder = mini.path(name)
    tokenizer = load_tokenizer(folder)
    ids = np.asarray([tokenizer.encode(Path(__file__).read_text())[:300]])
    ours, arch = jax_logits(folder, ids)
    np.testing.assert_allclose(ours, transformers_logits(folder, ids), atol=TOLERANCE)
    nats = -np.asarray(jax.nn.log_softmax(ours[0, :-1]))[np.arange(299), ids[0, 1:]]
    assert nats.mean() < 4.0  # it has learnt Python: chance is 8.3
    assert any(layer.kv_from is not None for layer in arch.layers) == (name == "mini-e")


@pytest.mark.parametrize("name", mini.NAMES)
def test_embedded_tokenizer_is_the_same_in_transformers(name: str) -> None:
    from transformers import AutoTokenizer

    folder = mini.path(name)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write a loop over 12 itéms: \t 🙂\n        x"},
        {"role": "assistant", "content": "for i in range(12):\n    pass"},
        {"role": "user", "content": "Thanks"},
    ]
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.encode_chat(messages) == chat
    assert ours.encode(messages[1]["content"])[1:] == theirs.encode(messages[1]["content"])
    names = ("<eos>", "<turn|>", "<|tool_response>")
    assert ours.stop_ids == tuple(ours.token_id(name) for name in names)
