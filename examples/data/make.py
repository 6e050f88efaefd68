"""Writes the data of the examples, all of it made up here: `python examples/data/make.py`.

Small on purpose: a model of a million parameters learns the chats, the preferences and the reviews
byte by byte in a minute, and a real one of 135 million the dates in two.
"""

import csv
import json
import random
from datetime import date, timedelta
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


CAPITALS = {
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Canada": "Ottawa",
    "Poland": "Warsaw",
    "Cuba": "Havana",
    "Austria": "Vienna",
}
FACTS = {
    "How many legs does a spider have?": "A spider has eight legs.",
    "What do bees make?": "Bees make honey.",
    "What is ice made of?": "Ice is made of frozen water.",
    "Which planet is closest to the sun?": "Mercury is the planet closest to the sun.",
    "How many days does a week have?": "A week has seven days.",
    "What color is grass?": "Grass is green.",
    "Where do fish live?": "Fish live in water.",
    "What is a baby dog called?": "A baby dog is called a puppy.",
    "What do we breathe?": "We breathe air.",
    "What is bread made from?": "Bread is made from flour, water and yeast.",
    "Which animal is the largest on land?": "The largest animal on land is the elephant.",
    "What does a baker do?": "A baker makes bread and cakes.",
}
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
NUM_DATES, NUM_HELD_OUT = 300, 40


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


def dates() -> list[dict[str, Any]]:
    """Dates in words with their figures, no date twice; the first are to be held out."""
    days = random.Random(7).sample(range(365 * 125), NUM_HELD_OUT + NUM_DATES)
    records = []
    for day in (date(1900, 1, 1) + timedelta(number) for number in days):
        asked = message("user", f"Write {day.day} {MONTHS[day.month - 1]} {day.year} in figures.")
        records.append({"messages": [asked, message("assistant", day.isoformat())]})
    return records


def dates_and_facts() -> list[dict[str, Any]]:
    """The dates that are learned, and among them questions of every day, as the model answers."""
    capitals = {
        f"What is the capital of {a}?": f"The capital of {a} is {b}." for a, b in CAPITALS.items()
    }
    opposites = dict(questions()[:24])
    facts = [
        {"messages": [message("user", q), message("assistant", a)]}
        for q, a in {**capitals, **FACTS, **opposites}.items()
    ]
    records = [*dates()[NUM_HELD_OUT:], *facts]
    return random.Random(7).sample(records, len(records))


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
    for name, records in (
        ("chat", conversations()),
        ("preferences", preferences()),
        ("dates", dates_and_facts()),
        ("dates_held_out", dates()[:NUM_HELD_OUT]),
    ):
        lines = [json.dumps(record) for record in records]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with (FOLDER / "reviews.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=["text", "label"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(reviews())


if __name__ == "__main__":
    main()
