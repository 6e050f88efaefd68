from hypothesis import strategies as st

from roundpipe_lightning.planning.model.hardware import HardwareSpec, MatrixRates
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile


def uniform_profile(
    num_blocks: int, *, forward: float = 1.0, backward: float = 2.0, tail: float = 1.0
) -> ModelProfile:
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


def machine(
    num_devices: int,
    *,
    link: float = 100.0,
    host: float = 1e30,
    device_bytes: int = 10**12,
    shares_host_memory: bool = False,
) -> HardwareSpec:
    """Return a machine whose links carry `link` bytes per second each way."""
    return HardwareSpec(
        name=f"testx{num_devices}",
        device_name="test",
        num_devices=num_devices,
        device_bytes=device_bytes,
        matrix_rates=MatrixRates(float32=1.0),
        memory_bytes_per_second=1.0,
        upload_bytes_per_second=link,
        download_bytes_per_second=link,
        devices_per_root=num_devices,
        root_upload_bytes_per_second=1e30,
        root_download_bytes_per_second=1e30,
        host_bytes=10**15,
        host_bytes_per_second=host,
        shares_host_memory=shares_host_memory,
    )
