"""`roundpipe-data`: what is in data files, and a sample as tokens with the learned part marked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

import torch
from lightning_utilities.core import rank_zero
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from roundpipe_lightning.cli.objects import build, run_explained, visible, whole
from roundpipe_lightning.data import ByteDataModule, ClassificationDataModule, FileDataModule
from roundpipe_lightning.data.samples import IGNORED, Sample
from roundpipe_lightning.errors import ConfigurationError


def run(config: DictConfig) -> int | None:
    return run_explained(show, config)


def show(config: DictConfig) -> None:
    """Print the form of each file, a sample of each form, and what the rows come to."""
    most = whole("tokens", config.tokens)
    whole("data.batch_size", config.data.get("batch_size"))
    config.data.batch_size = 1  # however few samples there are
    data = build(config.data)
    if isinstance(data, ByteDataModule) or not isinstance(data, FileDataModule):
        raise ConfigurationError(
            "roundpipe-data shows data of files: name some, such as data=chats.jsonl."
        )
    console, shown = Console(soft_wrap=True, highlight=False), set()
    for part in data.files.parts():
        samples = (each for record in data.files.read(part) for each in data.samples_of(record))
        first = next(samples, None)
        form = data.forms.found[part][0].name if part in data.forms.found else "texts with a class"
        what = "no sample" if first is None else form
        console.print(f"{visible(str(part))}: {what}", markup=False)
        if form not in shown and first is not None:
            shown.add(form)
            answers = first if isinstance(first, tuple) else (first,)
            names = ("chosen", "rejected")
            if isinstance(data, ClassificationDataModule):
                console.print(visible(f"class {data.classes[first['labels']]}:"), markup=False)
                tokens = first["input_ids"]
                answers = (Sample(input_ids=tokens, labels=torch.full_like(tokens, IGNORED)),)
            if answers[-1] is True or answers[-1] is False:  # of a judged answer
                names = ("a wanted answer", "") if answers[-1] else ("an unwanted answer", "")
            for name, sample in zip(names, answers, strict=False):
                if isinstance(sample, Sample):
                    if len(answers) > 1:
                        console.print(f"{name}:")
                    console.print(marked(sample, data.tokenizer, most=most))
    logging.getLogger(rank_zero.log.name).setLevel(logging.WARNING)  # the summary is printed here
    data.setup()
    console.print(visible(data.summary), markup=False)


def marked(sample: Sample, tokenizer: Any, *, most: int) -> Text:
    """A sample as tokens between bars, learned runs of them in green and in `[[ ]]`."""
    text = Text()
    for is_learned, tokens in islice(_runs(sample), 1000):
        if most <= 0:
            break
        words = "|".join(tokenizer.decode([token]) for token in tokens[:most]).replace(
            "\n", "\\n\n"
        )
        words = visible(words)
        text.append(f"[[{words}]]" if is_learned else words, "green" if is_learned else "")
        most -= len(tokens)
    text.append(
        f"\n({len(sample)} tokens, {sample.num_targets} of them learned, in [[ ]]"
        f"{', the first of them shown' if most < 0 else ''})"
    )
    return text


def _runs(sample: Sample) -> Iterator[tuple[bool, list[int]]]:
    pairs = zip(sample.labels.tolist(), sample.input_ids.tolist(), strict=True)
    for is_learned, run in groupby(pairs, key=lambda pair: pair[0] != IGNORED):
        yield is_learned, [token for _, token in run]
