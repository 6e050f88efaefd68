"""Writes the data of the examples, all of it made up here: `python examples/data/make.py`.

Small on purpose: a model of a million parameters learns it byte by byte in a minute.
"""

import csv
import json
from itertools import product
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent

OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "light": "dark",
    "near": "far",
    "open": "closed",
    "early": "late",
    "full": "empty",
    "hard": "soft",
    "high": "low",
    "wet": "dry",
    "loud": "quiet",
}
THINGS = ("book", "film", "soup", "hotel", "concert", "game", "walk", "teacher")
PRAISE = ("wonderful", "a great joy", "better than I hoped", "just lovely", "worth every minute")
BLAME = ("dreadful", "a waste of time", "worse than I feared", "just boring", "not worth the money")
OPENINGS = (
    "The {} was {}.",
    "What a {}: {}!",
    "I think the {} was {}.",
    "Our {} was {}, I must say.",
)


def message(role: str, content: str) -> dict[str, str]:
    """One message of a conversation."""
    return {"role": role, "content": content}


def questions() -> list[tuple[str, str]]:
    """Questions with their answers."""
    pairs = [*OPPOSITES.items(), *((b, a) for a, b in OPPOSITES.items())]
    asked = [(f"What is the opposite of {a}?", f"The opposite of {a} is {b}.") for a, b in pairs]
    counted = [(f"What comes after {n}?", f"After {n} comes {n + 1}.") for n in range(1, 97)]
    return [*asked, *counted]


def conversations() -> list[dict[str, Any]]:
    """One question each, and some with two."""
    asked = questions()
    single = [[message("user", q), message("assistant", a)] for q, a in asked]
    system = message("system", "Answer in one sentence.")
    double = [
        [system, *first, *second] for first, second in zip(single[::4], single[2::4], strict=True)
    ]
    return [{"messages": messages} for messages in (*single, *double)]


def preferences() -> list[dict[str, Any]]:
    """A polite answer and a rude one to every question."""
    rude = ("Find out yourself.", "Who cares?", "No idea.")
    return [
        {"prompt": question, "chosen": answer, "rejected": rude[index % len(rude)]}
        for index, (question, answer) in enumerate(questions())
    ]


def reviews() -> list[dict[str, str]]:
    """Reviews with the class `good` or `bad`."""
    words = [*((word, "good") for word in PRAISE), *((word, "bad") for word in BLAME)]
    return [
        {"text": opening.format(thing, word), "label": label}
        for opening, thing, (word, label) in product(OPENINGS, THINGS, words)
    ]


def main() -> None:
    """Write all files beside this one."""
    for name, records in (("chat", conversations()), ("preferences", preferences())):
        lines = [json.dumps(record) for record in records]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with (FOLDER / "reviews.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=["text", "label"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(reviews())


if __name__ == "__main__":
    main()
