from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.planning.cost.device_memory import Footprint
from roundpipe_lightning.planning.model.hardware import RESERVED_BYTES
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.plan import PipelineLayout
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.limits import resident_blocks
from tests.kit.profiles import machine

ONES = Partition(forward=(1,) * 4, backward=(0,) + (1,) * 4)
LAYOUT = PipelineLayout(partition=ONES, num_microbatches=2, round_size=2)


def footprint(
    *sizes: int, trained: float = 0.0, room: int = 10**6, num_devices: int = 1
) -> Footprint:
    blocks = tuple(
        BlockProfile(name=f"b{index}", parameter_bytes=size, trainable_bytes=round(size * trained))
        for index, size in enumerate(sizes)
    )
    hardware = machine(num_devices, device_bytes=RESERVED_BYTES + room)
    return Footprint(ModelProfile(blocks=blocks, fingerprint=""), hardware=hardware)


def test_workers_keep_blocks_of_their_own_stages() -> None:
    # stages F0 F1 F2 F3 X0 B1 B2 B3 B4 on three workers
    found = resident_blocks(footprint(10, 10, 10, 10, num_devices=3), LAYOUT)
    assert found == ((0, 2, 3), (1,), (0, 2, 3))
    team = replace(LAYOUT, team_size=2)
    found = resident_blocks(footprint(10, 10, 10, 10, num_devices=2), team)
    assert found == ((0, 1, 2, 3), (0, 1, 2, 3))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 50), min_size=4, max_size=4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(100, 500),
)
def test_what_stays_fits(
    sizes: list[int], workers: int, round_size: int, slots: int, trained: float, room: int
) -> None:
    model = footprint(*sizes, trained=trained, room=room, num_devices=workers)
    layout = replace(LAYOUT, round_size=round_size, weight_slots=slots)
    if not model.fits(layout):
        return
    held = replace(layout, resident=resident_blocks(model, layout))
    assert model.fits(held)
    assert min(size for _, size in model.need(held).num_bytes) > 0
