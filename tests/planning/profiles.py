"""Model profiles that the planning tests share."""

from __future__ import annotations

from hypothesis import strategies as st

from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile


def uniform_profile(
    num_blocks: int, *, forward: float = 1.0, backward: float = 2.0, tail: float = 1.0
) -> ModelProfile:
    """Return a model of equal blocks; the tail's backward takes as long as its forward."""

    def block(name: str) -> BlockProfile:
        return BlockProfile(name=name, forward_seconds=forward, backward_seconds=backward)

    return ModelProfile(
        blocks=tuple(block(f"layers.{i}") for i in range(num_blocks)),
        tail=BlockProfile(name="tail", forward_seconds=tail, backward_seconds=tail),
        fingerprint="uniform",
    )


_seconds = st.floats(min_value=0, max_value=10, allow_nan=False, allow_subnormal=False)


@st.composite
def random_profiles(draw: st.DrawFn, *, max_blocks: int = 12) -> ModelProfile:
    """Return a model of 0 to `max_blocks` blocks with random durations, zeros among them."""

    def segment(name: str) -> BlockProfile:
        return BlockProfile(
            name=name, forward_seconds=draw(_seconds), backward_seconds=draw(_seconds)
        )

    num_blocks = draw(st.integers(0, max_blocks))
    return ModelProfile(
        blocks=tuple(segment(f"layers.{i}") for i in range(num_blocks)),
        head=segment("head"),
        tail=segment("tail"),
        fingerprint="random",
    )
