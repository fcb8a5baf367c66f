"""Sentences of the repository are about things that act in code, not about persons."""

from __future__ import annotations

import re

from tests.house.prose import sentences
from tests.support.places import ROOT

PERSON = re.compile(
    r"\b(who|whose|whom|whoever|nobody|somebody|someone|anybody|anyone|everybody|everyone"
    r"|asks?|asked|asking|tells?|telling|told|knows?|knew|knowing|unknowing"
    r"|wants?|wanted|wanting|wish|wishes|wished|says?|said|saying|speaks?|spoke|spoken"
    r"|remembers?|remembered|forgets?|forgot|forgotten|promises?|promised|believes?|believed"
    r"|hears?|heard|mine|decides for itself|minds?|cares?|learns? of|hopes?|trusts?|trusted"
    r"|what others?)\b",
    re.IGNORECASE,
)
"""Words for people. \"Think\" is a feature of models and may stand."""
SHARE = 0.01
"""Of sentences, at most: people do use specdec, and a few sentences are about them."""


def of_people(text: str) -> bool:
    return bool(PERSON.search(text))


def test_sentences_are_about_code():
    found, all_of_them = [], 0
    for sentence in sentences(ROOT):
        all_of_them += 1
        if of_people(sentence.text):
            found.append(f"{sentence.file.relative_to(ROOT)}:{sentence.line}: {sentence.text}")
    assert all_of_them > 5000, "tests/house/prose.py misses most of the text"
    assert len(found) <= SHARE * all_of_them, "\n".join(found)


def test_a_sentence_about_a_person_is_found(tmp_path):
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "bad.py").write_text(
        '"""Rows whose text ended. They are freed."""\n\n# so that the loop knows them\n'
        'LIMIT = 3\n"""Nobody asks for more."""\nprint("tell the server how long it may be")\n'
        'print("`asks` is the name of a field")\n'
    )
    (tmp_path / "serve" / "bad.cu").write_text("int a;  // what the warp was told before\n")
    found = [sentence.text for sentence in sentences(tmp_path) if of_people(sentence.text)]
    assert sorted(found) == [
        "Nobody asks for more.",
        "Rows whose text ended.",
        "so that the loop knows them",
        "tell the server how long it may be",
        "what the warp was told before",
    ]
