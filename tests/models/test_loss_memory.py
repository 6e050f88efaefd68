from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loss_memory import chunked_loss_bytes, plain_loss_bytes
from roundpipe_lightning.models.losses.chunked_loss import chunk_tokens

VOCABULARY = 151_936


@given(
    num_tokens=st.integers(1, 40_000),
    vocabulary=st.integers(1, 300_000),
    bytes_per_logit=st.sampled_from([4, 6, 8, 10]),
    chunk_bytes=st.integers(1, 2**28),
)
def test_chunks_keep_to_the_budget_and_cover_everything(
    num_tokens: int, vocabulary: int, bytes_per_logit: int, chunk_bytes: int
) -> None:
    tokens = chunk_tokens(
        num_tokens=num_tokens,
        vocabulary=vocabulary,
        bytes_per_logit=bytes_per_logit,
        chunk_bytes=chunk_bytes,
    )
    assert 1 <= tokens <= num_tokens
    assert tokens * vocabulary * bytes_per_logit <= max(chunk_bytes, vocabulary * bytes_per_logit)


def test_32_thousand_tokens_take_a_twentieth_of_the_plain_loss() -> None:
    for hidden_size in (1024, 2048, 4096):
        for compute_bytes in (2, 4):
            sizes: dict[str, Any] = {
                "num_tokens": 32_768,
                "hidden_size": hidden_size,
                "vocabulary": VOCABULARY,
                "compute_bytes": compute_bytes,
            }
            assert chunked_loss_bytes(**sizes) <= 0.05 * plain_loss_bytes(**sizes)
            frozen = chunked_loss_bytes(**sizes, trains_weight=False)
            assert chunked_loss_bytes(**sizes) - frozen == 4 * hidden_size * VOCABULARY
