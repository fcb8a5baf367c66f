"""The receipt's own prompts: eight categories of four chats, written for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Seqs
from dataclasses import replace
from pathlib import Path

from specdec.core.errors import UserError
from specdec.evaluation.prompts import Prompt, read_prompts
from targets import mini

LONG = "long_context"
CODING = ("coding", "humaneval")
"""Categories of prompts that are about code."""
ALL = "all"
"""The row of all categories, or of all lengths."""
LONGEST_NAME = 40
"""Characters of a category's name, at most: a longer one is no name, and might be a prompt."""
MOST_CATEGORIES = 32
"""Of a file; each has rows of its own in the receipt."""
QUESTIONS: dict[str, tuple[str, str, str, str]] = {
    "coding": (
        "Write a Python function that merges two sorted lists into one sorted list. Add a "
        "docstring and three short tests.",
        "Write a Python class for a queue of fixed capacity on top of a list. It has the methods "
        "push, pop and peek, and raises IndexError where that is right.",
        "This function is slow for large n:\n\n```python\ndef fib(n):\n    return n if n < 2 else "
        "fib(n - 1) + fib(n - 2)\n```\n\nMake it fast, and show the whole function.",
        "Write a SQL query that lists, for each customer, the date and the amount of the latest "
        "order. The tables are customers(id, name) and orders(id, customer_id, day, amount).",
    ),
    "math": (
        "A train leaves at 8:40 and arrives at 11:25. It stops twice for 6 minutes. For how many "
        "minutes does it move? Show each step.",
        "Solve 3x + 2y = 12 and x - y = 1 for x and y, step by step.",
        "A shop lowers a price of 80 euros by 15 percent and then by another 10 percent. What is "
        "the price now, and by how many percent did it fall in all?",
        "How many ways are there to seat five people in a row if two of them sit side by side? "
        "Explain your reasoning.",
    ),
    "reasoning": (
        "Anna is older than Ben. Carla is younger than Ben. Dora is older than Anna. Who is the "
        "second oldest? Explain in two sentences.",
        "A bat and a ball cost 1.10 together, and the bat costs 1.00 more than the ball. What does "
        "the ball cost? Check your answer.",
        "Three boxes are labelled apples, oranges and both, and every label is wrong. You may take "
        "one fruit out of one box. How do you find out what is in each?",
        "If all bloops are razzies and some razzies are lazzies, are some bloops certainly "
        "lazzies? Explain.",
    ),
    "qa": (
        "Why is the sky blue in the day and red in the evening?",
        "What is the difference between a virus and a bacterium?",
        "How does a bicycle stay upright while it moves?",
        "Name three causes of inflation, with one sentence for each.",
    ),
    "writing": (
        "Write a short letter in which a tenant asks for the repair of a dripping tap.",
        "Write the opening paragraph of a story that takes place in a lighthouse in winter.",
        "Write a friendly message that moves a meeting from Tuesday to Thursday.",
        "Describe a market in the morning in six sentences, without the word beautiful.",
    ),
    "summarization": (
        "Summarise in two sentences: The town's library was built in 1911 with money from a sugar "
        "merchant. After a fire in 1954 only the walls stood. It was rebuilt with a glass roof, "
        "which leaked for thirty years, until the roof was renewed in 1987. Today it lends 40,000 "
        "books a year, and its reading room is open until midnight.",
        "Summarise as three bullet points: Our bakery opens at six. Bread is baked three times a "
        "day, the last time at four in the afternoon. What is left at seven in the evening is "
        "given to the shelter in Mill Street. On Sundays we bake rolls only. Orders for cakes have "
        "to be placed two days ahead.",
        "Give this text a title of at most six words: Bees find their way back with the help of "
        "the sun. Where clouds hide it, they use the polarisation of the light, which our eyes do "
        "not see. Young bees fly in growing circles around the hive before their first long trip.",
        "Write one sentence that contains the main points: The bridge was closed in March after "
        "cracks were found. Engineers first thought of repairing it. Measurements over the summer "
        "showed that the cracks grew. The city will build a new bridge beside the old one, which "
        "will be torn down in four years.",
    ),
    "translation": (
        "Translate into German: The meeting starts at nine, and nobody should be late.",
        "Translate into French: I would like a room with a view of the sea for two nights.",
        "Translate into Spanish: The report will be ready tomorrow, if the data arrive today.",
        "Translate into English: Morgen fahren wir mit dem Zug nach Hamburg und kommen am Abend "
        "zurück.",
    ),
    LONG: (
        "Explain in a few sentences what this document is about:\n\n{text}",
        "List the sections of this document, with one line for each:\n\n{text}",
        "Which three figures of this document matter most, and why?\n\n{text}",
        "Find the longest sentence of this document and repeat it word by word:\n\n{text}",
    ),
}
"""By category; {text} is the beginning of the embedded models' cards, which lie wherever specdec
runs and change no more than their weights: receipts of different versions can be compared."""


def built_in(long_texts: Seqs[int]) -> list[Prompt]:
    """All of them. long_texts: characters of the long prompts' texts."""
    cards = _cards(max(long_texts))
    prompts = []
    for category, texts in QUESTIONS.items():
        for number, text in enumerate(texts):
            content = text.replace("{text}", cards[: long_texts[number]])
            message = {"role": "user", "content": content}
            prompts.append(Prompt(f"{category}-{number}", category, "chat", messages=(message,)))
    return prompts


def _cards(characters: int) -> str:
    """One after the other, and again from the start if they end."""
    files = (mini.path(name) / "CARD.md" for name in mini.NAMES)
    whole = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    return whole * (1 + characters // len(whole))


def from_file(path: Path) -> list[Prompt]:
    """A file's prompts, numbered, with the names of their categories checked, since these stand in
    the receipt. Raises UserError."""
    read = read_prompts(path, category="uncategorised")
    prompts = [replace(prompt, id=str(number)) for number, prompt in enumerate(read, 1)]
    for prompt in prompts:
        number, name = prompt.id, prompt.category
        if not is_name(name):
            raise UserError(
                f"--prompts: the category of prompt {number} must be a name of letters, digits, - "
                f"and _, at most {LONGEST_NAME} characters and not {ALL}, as the receipt shows it"
            )
    if len({prompt.category for prompt in prompts}) > MOST_CATEGORIES:
        raise UserError(f"--prompts: at most {MOST_CATEGORIES} categories, each has its own rows")
    return prompts


def is_name(category: str) -> bool:
    """Whether it may stand in a receipt: it is no sentence, no path and no markup."""
    plain = category.replace("_", "").replace("-", "")
    return plain.isalnum() and len(category) <= LONGEST_NAME and category != ALL


def digest(prompts: Seqs[Prompt]) -> str:
    """sha256 of all prompts' texts and categories."""
    rows = [[p.category, p.kind, p.text, list(p.messages)] for p in prompts]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
