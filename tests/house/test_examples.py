"""Each script of examples/ runs and prints what it demonstrates."""

from __future__ import annotations

import runpy

import pytest

from tests.support.pictures import file_of, levels
from tests.support.places import ROOT
from tests.support.serving import Server
from tools import seeing_mini

FOLDER = ROOT / "examples"
OF_A_SERVER = {
    "chat": ["def ", "tokens, tau "],
    "tools": ["get_weather(city=", "unit="],
    "structured_output": ["Review(verdict="],
    "predicted_output": ["without a prediction: 80 tokens in", "with a prediction: 80 tokens in"],
    "who_guessed": ["prompt  ", "verify  ", "guessed by ngram"],
    "on_and_off": ["with speculation: ", "without speculation: ", "tau 1.0", "\nequal\n"],
}
OF_THE_LIBRARY = {
    "batch": ["def first(items):", "\nequal\n"],
    "library": ["the same seed, the same text: True", "had a chance of 0."],
}
TRAINING = [
    "8 answers in",
    "step 8: held-out loss",
    "wrote step 8 to",
    "equal to plain decoding",
]
REPLICAS = ["8 answers of 2 replicas", "\nequal\n"]


@pytest.mark.parametrize("name", OF_A_SERVER)
def test_an_example_of_a_server(mini_server: Server, capsys, name):
    runpy.run_path(str(FOLDER / f"{name}.py"))["main"](mini_server.url)
    said = capsys.readouterr().out
    assert all(words in said for words in OF_A_SERVER[name]), said


@pytest.mark.usefixtures("cheap_programs")
@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_an_example_of_the_library(capsys, name):
    runpy.run_path(str(FOLDER / f"{name}.py"))["main"]()
    said = capsys.readouterr().out
    assert all(words in said for words in OF_THE_LIBRARY[name]), said


@pytest.mark.usefixtures("cheap_programs")
def test_the_example_of_pictures(capsys, tmp_path):
    model = seeing_mini.write(tmp_path / "seeing")
    picture = tmp_path / "picture.png"
    picture.write_bytes(file_of(levels(60, 97)))
    runpy.run_path(str(FOLDER / "pictures.py"))["main"](str(model), str(picture))
    said = capsys.readouterr().out
    assert "none: 81 tokens in, tau 1.00" in said and said.endswith("\nequal\n"), said


@pytest.mark.slow
def test_the_example_of_training(capfd, tmp_path):
    run = runpy.run_path(str(FOLDER / "train_drafter.py"))["main"]
    run(str(tmp_path / "kept"))
    said, told = capfd.readouterr()
    assert all(words in said + told for words in TRAINING), said + told


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # of Ray's own
def test_the_example_of_replicas(capsys):
    pytest.importorskip("ray")
    runpy.run_path(str(FOLDER / "replicas.py"))["main"]()
    said = capsys.readouterr().out
    assert all(words in said for words in REPLICAS), said


def test_every_script_is_run_and_listed():
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    apart = {"pictures", "train_drafter", "replicas"}
    assert scripts == {*OF_A_SERVER, *OF_THE_LIBRARY} | apart
    listed = (FOLDER / "README.md").read_text()
    assert all(f"[{name}.py]({name}.py)" in listed for name in scripts)
