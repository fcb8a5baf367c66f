"""The tokenizer follows the checkpoint: one BOS, whole characters, its own stop ids."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings, strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from specdec.core.errors import UserError
from targets.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
TEMPLATE = (
    "{{ bos_token }}\n"
    "{%- for message in messages %}\n"
    "    {%- if message['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}\n"
    "{{ '<|turn>' + message['role'] + '\\n' + message['content'] | trim + '<turn|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


def write_checkpoint(folder: Path, **generation: object) -> Path:
    """A byte-level BPE of about 300 entries in a checkpoint folder."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["def add(a, b):\n    return a + b\n" * 20], trainer)
    backend.save(str(folder / "tokenizer.json"))
    size = backend.get_vocab_size()
    put(folder / "config.json", {"text_config": {"vocab_size": size, "eos_token_id": 1}})
    put(folder / "tokenizer_config.json", {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"})
    put(folder / "generation_config.json", generation)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def put(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        eos_token_id=[1, 6],
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        suppress_tokens=[4],
    )


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.mark.parametrize("half", ["\ud83d", "\ude00", "\udce9"])
def test_a_part_of_a_character_is_one_line(folder, half):
    """Of an emoji that was cut in two, or of bytes that are no UTF-8."""
    tokenizer = load_tokenizer(folder)
    with pytest.raises(UserError, match="the prompt: character 4 of the text is only a part"):
        tokenizer.encode(f"caf{half}")
    with pytest.raises(UserError, match="the prompt: character 3 of the text is only a part"):
        tokenizer.encode_pieces(["a", f"b{half}"])
    with pytest.raises(UserError, match="only a part of one"):
        tokenizer.encode_chat([{"role": "user", "content": f"caf{half}"}])
    assert tokenizer.decode(tokenizer.encode("\U0001f600")) == "\U0001f600"


def test_bos_comes_exactly_once(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("x = 1")
    assert plain[0] == 2 and plain.count(2) == 1
    assert tokenizer.encode("<bos>x = 1") == plain
    assert tokenizer.encode("") == [2]
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert chat[0] == 2 and chat.count(2) == 1


def test_render_is_what_the_template_says(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": " hi "}]
    assert tokenizer.render(messages) == "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    without = tokenizer.render(messages, add_generation_prompt=False)
    assert without == "<bos><|turn>user\nhi<turn|>\n"


def test_stop_ids_and_defaults_come_from_generation_config(tokenizer: Tokenizer) -> None:
    assert tokenizer.stop_ids == (1, 6)
    assert tokenizer.suppress_ids == (4,)
    assert tokenizer.defaults == {"temperature": 0.8, "top_p": 0.95}


def test_stop_ids_fall_back_to_config_and_never_hold_the_newline(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert load_tokenizer(tmp_path).stop_ids == (1,)
    newline = load_tokenizer(tmp_path).encode("\n")[-1]
    put(tmp_path / "generation_config.json", {"eos_token_id": [1, newline], "do_sample": False})
    again = load_tokenizer(tmp_path)
    assert again.stop_ids == (1,)
    assert again.defaults == {"temperature": 0.0}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_stream_equals_decode_and_splits_no_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [stream.step(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 299), max_size=60))
@example(ids=[*[101] * 7, 133, 101])  # bytes of no character, then one that is
@example(ids=[133, *[0] * 7, 101])  # hidden tokens within a character
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stream_survives_any_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = tokenizer.stream()
    text = "".join(stream.step(token) for token in ids) + stream.finish()
    assert text.replace("\ufffd", "") == tokenizer.decode(ids).replace("\ufffd", "")


@pytest.mark.parametrize("text", ["plain words", "\u20ac\U0001f600 \u00e9", "\ufffd"])
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_each_token_has_its_own_bytes(tokenizer: Tokenizer, kind: str, text: str) -> None:
    """mini's tokenizer spells bytes as letters, Gemma's as <0xE2>."""
    if kind == "byte fallback":
        words = {"<bos>": 0, "\u2581": 1} | {f"<0x{i:02X}>": i + 2 for i in range(256)}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], byte_fallback=True))
        steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback()]
        backend.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Fuse()])
        tokenizer = Tokenizer(backend, {}, None, {}, "")
        ids = backend.encode(text.replace(" ", "\u2581")).ids
    else:
        ids = tokenizer.encode(text)[1:]
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_stream_flushes_an_incomplete_tail(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    ids = tokenizer.encode("é")[1:]
    assert len(ids) == 2
    for special in [6] * 12:
        assert stream.step(special) == ""
    assert stream.step(ids[0]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_special_tokens_are_hidden_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hi"), 6]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<bos>hi<turn|>"
    assert tokenizer.stream(skip_special=False).step(6) == "<turn|>"


def test_missing_tokenizer_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


def test_other_vocabulary_size_names_both_numbers(folder: Path) -> None:
    size = load_tokenizer(folder).vocab_size
    with pytest.raises(UserError, match=rf"{size} entries.*vocab_size is 777"):
        load_tokenizer(folder, vocab_size=777)
    with pytest.raises(UserError, match=rf"{size} entries.*vocab_size is {size - 1}"):
        load_tokenizer(folder, vocab_size=size - 1)


def test_broken_files_are_user_errors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        load_tokenizer(tmp_path)


def test_chat_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "hi"}])


def test_template_may_stand_in_the_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "{{ messages | tojson }}"}]
    put(tmp_path / "tokenizer_config.json", {"bos_token": "<bos>", "chat_template": named})
    assert load_tokenizer(tmp_path).render([{"role": "é"}]) == '[{"role": "é"}]'


@pytest.mark.parametrize("message", [{"role": "bad", "content": ""}, {}])
def test_refusing_template_is_a_user_error(tokenizer: Tokenizer, message: dict) -> None:
    with pytest.raises(UserError, match="chat template refuses"):
        tokenizer.encode_chat([message])


def test_template_cannot_reach_the_interpreter(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(UserError, match="chat template refuses"):
        load_tokenizer(tmp_path).render([])


def test_fingerprint_is_the_file_hash(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert len(load_tokenizer(folder).fingerprint) == 64
    assert load_tokenizer(folder).fingerprint == load_tokenizer(tmp_path).fingerprint
