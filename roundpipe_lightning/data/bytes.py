"""Text as bytes: the smallest vocabulary there is, and no tokenizer to download."""

from collections.abc import Iterable

import torch
from torch import Tensor

NUM_TOKENS = 257
"""Token ids in use: one for each byte (0 to 255) and the document separator."""

DOCUMENT_SEPARATOR = 256
"""Token id written before every document."""


def pack(documents: Iterable[bytes], *, seq_len: int) -> Tensor:
    """Lay documents end to end, each after a separator, and cut them into equal windows.

    The tokens left over after the last whole window are dropped.

    Args:
        documents: The documents, in order.
        seq_len: Tokens of a window.

    Returns:
        Token ids, int16, on the CPU, shape (windows, seq_len); no window for too little text.
    """
    pieces = []
    separator = torch.tensor([DOCUMENT_SEPARATOR], dtype=torch.int16)
    for document in documents:
        pieces.append(separator)
        if document:
            raw = torch.frombuffer(bytearray(document), dtype=torch.uint8)
            pieces.append(raw.to(torch.int16))
    stream = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int16)
    num_windows = stream.numel() // seq_len
    return stream[: num_windows * seq_len].reshape(num_windows, seq_len)
