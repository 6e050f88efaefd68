"""Packing documents into windows."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.data.bytes import DOCUMENT_SEPARATOR, NUM_TOKENS, pack


def test_every_document_follows_a_separator() -> None:
    windows = pack([b"ab", b"", b"c\xff"], seq_len=7)
    separator = DOCUMENT_SEPARATOR
    assert windows.tolist() == [[separator, 97, 98, separator, separator, 99, 255]]


def test_no_document_makes_no_window() -> None:
    assert pack([], seq_len=4).shape == (0, 4)


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(min_value=1, max_value=16))
def test_nothing_but_the_last_tokens_is_lost(documents: list[bytes], seq_len: int) -> None:
    windows = pack(documents, seq_len=seq_len)
    num_tokens = sum(map(len, documents)) + len(documents)
    assert windows.shape == (num_tokens // seq_len, seq_len)
    assert windows.dtype == torch.int16
    expected = [token for document in documents for token in (DOCUMENT_SEPARATOR, *document)][
        : windows.numel()
    ]
    assert windows.flatten().tolist() == expected
    assert all(0 <= token < NUM_TOKENS for token in expected)
