"""Storage of each parameter in training, and the bytes that move for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile

_COMPUTE_BITS = 16
_MAPPED_PASSES = 3

STATE_WINDOW_BYTES = 64 << 20
"""Optimizer state on disk that is read, stepped and written at a time."""

_NUM_STATE_WINDOWS = 3  # one is read ahead, one stepped, one written behind


SCALE_BLOCK = 64
"""Quantised weights that share a float32 scale."""


class WeightStorage(Enum):
    """Storage of the weights that are uploaded."""

    PAGE_LOCKED = "page_locked"
    """In page-locked host memory: a device reads them by itself."""

    MEMORY_MAPPED = "memory_mapped"
    """In the page cache, mapped from files: the host copies them into a page-locked buffer first,
    so each byte passes the host's memory three times instead of once."""

    ON_DISK = "on_disk"
    """The same, of more than the page cache holds: every upload reads them from the disk."""


@dataclass(frozen=True, kw_only=True)
class ParameterStorage:
    """Bytes per parameter; the defaults are those of AdamW with 16-bit weights on the devices.

    Attributes:
        weights: Where the weights lie that are uploaded.
        master_bytes: Of a trainable parameter's full-precision master; 0: it is uploaded itself.
        gradient_bytes: Of its gradient, summed up on the host.
        optimizer_bytes: Of its optimizer state in memory.
        disk_bytes: Of its optimizer state on disk.
        frozen_bits: Of a frozen parameter that can be quantised: 16, 8 or 4, beside its scales.

    Raises:
        ConfigurationError: A figure is negative, or there is no format of so many bits.
    """

    weights: WeightStorage = WeightStorage.PAGE_LOCKED
    master_bytes: float = 4.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    disk_bytes: float = 0.0
    frozen_bits: int = 16

    def __post_init__(self) -> None:
        for name in ("master_bytes", "gradient_bytes", "optimizer_bytes", "disk_bytes"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: give 0 or more.")
        if self.frozen_bits not in (16, 8, 4):
            raise ConfigurationError(f"frozen_bits={self.frozen_bits!r}: give 16, 8 or 4.")

    @property
    def update_bytes(self) -> float:
        """Bytes that the optimizer reads and writes for a trainable parameter in one step.

        It reads the gradient, reads and writes master and state, and writes the 16-bit copy. State
        on disk passes the memory as well.
        """
        state = self.optimizer_bytes + self.disk_bytes
        return self.gradient_bytes + 2 * self.master_bytes + 2 * state + 2

    def update_seconds(self, num_trainable: int, hardware: HardwareSpec) -> float:
        """Return the optimizer's time: the host's, or the disk's to read and write its state."""
        moved = 2 * num_trainable * self.disk_bytes
        in_memory = hardware.host_seconds(num_trainable * self.update_bytes)
        return max(in_memory, moved / hardware.disk_bytes_per_second)

    def placed(
        self, profile: ModelProfile, *, num_trainable: int, hardware: HardwareSpec
    ) -> ParameterStorage:
        """Return the storage with mapped weights on the disk where the page cache is too small.

        Uploads go through all of them in turn, so a cache that has no room for all has none of what
        is needed next.
        """
        if self.weights is not WeightStorage.MEMORY_MAPPED:
            return self
        mapped = sum(p.parameter_bytes - p.trainable_bytes for p in self.stored(profile).parts)
        kept = num_trainable * (self.master_bytes + self.gradient_bytes)
        held = kept + self.state_bytes(num_trainable)
        if mapped + held <= hardware.host_bytes:
            return self
        return replace(self, weights=WeightStorage.ON_DISK)

    def state_bytes(self, num_trainable: int) -> float:
        windows = min(num_trainable * self.disk_bytes, _NUM_STATE_WINDOWS * STATE_WINDOW_BYTES)
        return num_trainable * self.optimizer_bytes + windows

    def sum_bytes(self, downloaded_bytes: float) -> float:
        """Return the bytes that the host reads and writes to add 16-bit gradients to their sums."""
        return downloaded_bytes * (1 + 2 * self.gradient_bytes * 8 / _COMPUTE_BITS)

    def transfer_seconds(
        self, *, uploaded_bytes: float, downloaded_bytes: float, hardware: HardwareSpec
    ) -> float:
        """Time for which transfers keep the host's memory or the disk busy.

        The bytes are those of all devices together: weights up, gradients down.
        """
        if hardware.shares_host_memory:  # nothing is copied but from the disk
            on_disk = self.weights is WeightStorage.ON_DISK
            return uploaded_bytes / hardware.disk_bytes_per_second if on_disk else 0.0
        down = downloaded_bytes / hardware.host_bytes_per_second
        return uploaded_bytes / self._upload_rate(hardware) + down

    def _upload_rate(self, hardware: HardwareSpec) -> float:
        """Return the bytes per second that the weights' place gives to all devices together."""
        rate = hardware.host_bytes_per_second
        if self.weights is not WeightStorage.PAGE_LOCKED:
            rate *= hardware.efficiency.host / _MAPPED_PASSES
        if self.weights is WeightStorage.ON_DISK:
            rate = min(rate, hardware.disk_bytes_per_second)
        return rate

    def saved_bytes(self, num_parameters: int, num_bytes: int) -> float:
        if self.frozen_bits == _COMPUTE_BITS:
            return 0.0
        codes_and_scales = num_parameters * (self.frozen_bits / 8 + 4 / SCALE_BLOCK)
        return max(0.0, num_bytes - codes_and_scales)

    def stored(self, profile: ModelProfile) -> ModelProfile:
        """Return the model with frozen parameters of their size in storage."""

        def smaller(part: BlockProfile) -> BlockProfile:
            saved = self.saved_bytes(part.num_quantizable, part.quantizable_bytes)
            return replace(
                part,
                parameter_bytes=round(part.parameter_bytes - saved),
                expanded_bytes=part.quantizable_bytes if saved else 0,
            )

        return profile.each(smaller)

    def expanded_seconds(self, part: BlockProfile, hardware: HardwareSpec) -> float:
        """Time of a device to expand a block's frozen parameters to 16 bits after an upload."""
        saved = self.saved_bytes(part.num_quantizable, part.quantizable_bytes)
        moved = 2 * part.quantizable_bytes - saved  # the codes are read, the weights are written
        return hardware.memory_seconds(moved) if saved else 0.0

    def links(self, hardware: HardwareSpec) -> HardwareSpec:
        """Return the machine with the uploads that the weights' place allows."""
        if self.weights is WeightStorage.PAGE_LOCKED:
            return hardware
        copied = self._upload_rate(hardware)
        return replace(
            hardware,
            upload_bytes_per_second=min(hardware.upload_bytes_per_second, copied),
            root_upload_bytes_per_second=min(
                hardware.root_upload_bytes_per_second, copied / hardware.num_roots
            ),
            unequal=tuple(map(self.links, hardware.unequal)),
        )
