"""A checkpoint to which every host writes its part: a folder of torch.distributed.checkpoint.

```
last.ckpt/
  .metadata                which elements of which tensor lie where; replaced last
  host0-1f3a90c2-0.distcp  "structure": the checkpoint, with references in the place of tensors;
                           the elements that host 0 owns, and tensors that are not divided
  host1-1f3a90c2-0.distcp  the elements that host 1 owns
```

Elements that a host owns of a parameter lie one after the other, and torch knows boxes. A range is
cut into the fewest boxes; so tensors have their own shapes, and whatever reads such checkpoints
(`torch.distributed.checkpoint.format_utils`, say) reads these:

```
elements 3 to 13 of (4, 4)      . . . 3      row 0, columns 3 to 4
                                4 5 6 7      rows 1 to 3
                                8 9 . .
                                12 ...       row 3, columns 0 to 1
```
"""

from __future__ import annotations

import io
import math
import pickle
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.utils._pytree import tree_map, tree_map_with_path

from roundpipe_lightning.checkpoint.folder import (
    LEAST_BYTES,
    METADATA,
    REFERENCE,
    is_reference,
    keys_of,
    load_file,
    unreadable,
)
from roundpipe_lightning.engine.update.hosts_update import OwnedPart
from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.files import find_damage, new_folder, remove_remains, replace_folder

_STRUCTURE = "structure"

T = TypeVar("T")
Share: TypeAlias = Callable[[Any], Sequence[Any]]
"""Returns every host's object, by rank; all hosts call it."""

Key: TypeAlias = tuple[int, int, torch.dtype]
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def write_parts(
    checkpoint: Mapping[str, Any],
    path: Path,
    *,
    owned: Iterable[OwnedPart] = (),
    rank: int = 0,
    share: Share = lambda value: [value],
) -> None:
    """Write a checkpoint; every host calls this.

    Args:
        checkpoint: On every host with the same tensors; all else is host 0's.
        path: The folder, on a file system that all hosts have; host 0's counts.
        owned: What this host has of tensors that are divided; host 0 writes all others.
        rank: The number of this host.
        share: Reaches the others.

    Raises:
        CheckpointError: A host could not write its part; on all of them.
        HostError: Another host is lost.
    """
    planner = _SavePlanner(checkpoint, owned, writes_others=rank == 0)

    def on_all(task: Callable[[], T]) -> Sequence[T]:
        """Return what every host's task gave; raise on all hosts if one failed."""
        try:
            done, error = task(), None
        except (OSError, RuntimeError) as raised:  # torch's files raise the latter
            done, error = None, str(getattr(raised, "strerror", None) or raised)
        said = share((done, error))
        for host, (_, why) in enumerate(said):
            if why is not None:
                raise CheckpointError(
                    f"Host {host} could not write its part of the checkpoint {path}: {why}. What "
                    "was there before is untouched. checkpoint=distributed needs a folder that all "
                    "hosts have, with room for all parts."
                )
        return [cast("T", done) for done, _ in said]

    with ExitStack() as stack:

        def begin() -> tuple[Path, str] | None:
            if rank > 0:
                return None
            remove_remains(path)
            return stack.enter_context(new_folder(path)), secrets.token_hex(4)

        first = on_all(begin)[0]
        assert first is not None
        folder, writer = first[0], _Writer(first[0], version=first[1])

        def plan() -> SavePlan:
            if not folder.is_dir():
                raise FileNotFoundError(0, "the folder is not there, on a disk of its own perhaps")
            writer.set_up_storage_writer(is_coordinator=rank == 0)
            return writer.prepare_local_plan(planner.create_local_plan())

        plans, metadata = planner.create_global_plan(list(on_all(plan)))
        mine = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
        results = on_all(lambda: writer.write_data(mine, planner).value())

        def finish() -> None:
            if rank == 0:
                writer.finish(metadata, [list(each) for each in results])
                replace_folder(folder, path, index=METADATA, suffix=".distcp")

        on_all(finish)


class _Writer(FileSystemWriter):
    """Names files by host and version: new ones come beside those that they replace."""

    def __init__(self, path: Path, *, version: str) -> None:
        super().__init__(path, per_thread_copy_ahead=0)
        self._version = version

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # not where the folder was while it was written

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        named = super().prepare_global_plan(plans)
        return [
            replace(
                plan,
                storage_data=replace(plan.storage_data, prefix=f"host{host}-{self._version}-"),
            )
            for host, plan in enumerate(named)
        ]


class _SavePlanner(DefaultSavePlanner):
    """Plans what one host writes.

    Args:
        checkpoint: As of `write_parts`.
        owned: As of `write_parts`.
        writes_others: Whether this host writes what is not divided.
    """

    def __init__(
        self, checkpoint: Mapping[str, Any], owned: Iterable[OwnedPart], *, writes_others: bool
    ) -> None:
        super().__init__()
        self._tensors: dict[str, tuple[Tensor, OwnedPart | None]] = {}
        self._values: dict[MetadataIndex, Tensor] = {}
        self._paths: dict[str, tuple[Any, ...]] = {_STRUCTURE: (_STRUCTURE,)}
        parts = {_key(part.whole): part for part in owned}
        names: dict[tuple[Key, torch.Size, tuple[int, ...]], str] = {}

        def reference(path: tuple[Any, ...], value: Any) -> Any:
            if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
                return value
            key = _key(value)
            part = parts.get(key)
            if part is None and value.untyped_storage().nbytes() < LEAST_BYTES:
                return value
            keys = keys_of(path)
            name = names.setdefault((key, value.shape, value.stride()), ".".join(map(str, keys)))
            self._tensors.setdefault(name, (value.detach(), part))
            self._paths.setdefault(name, keys)
            return {REFERENCE: name}

        self._structure = tree_map_with_path(reference, dict(checkpoint))
        self._writes_others = writes_others

    def create_local_plan(self) -> SavePlan:
        items = []
        if self._writes_others:
            items.append(WriteItem(index=MetadataIndex(_STRUCTURE), type=WriteItemType.BYTE_IO))
        for name, (tensor, part) in self._tensors.items():
            if part is not None:
                stop = part.start + part.values.numel()
                found = boxes(tuple(tensor.shape), part.start, stop)
            else:
                whole = ((0,) * tensor.dim(), tuple(tensor.shape))
                found = iter([whole] if self._writes_others else [])
            at = 0
            for offsets, sizes in found:
                index = MetadataIndex(name, offsets)
                self._values[index] = tensor
                if part is not None:
                    self._values[index] = part.values[at : at + math.prod(sizes)].view(sizes)
                    at += math.prod(sizes)
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=tensor.shape,
                )
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self._paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type != WriteItemType.BYTE_IO:
            return self._values[write_item.index]
        content = io.BytesIO()
        torch.save(self._structure, content)
        return content


def _key(tensor: Tensor) -> Key:
    """Return what two tensors have in common that are the same memory."""
    return (tensor.data_ptr(), tensor.numel(), tensor.dtype)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut a range of the elements of a flattened tensor into boxes, in their order.

    Args:
        shape: Of the tensor.
        start: Its first element.
        stop: The element after the last one.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    pieces = [(start, min(first * row, stop)), (max(last, first) * row, stop)]
    for number, (begin, end) in enumerate(pieces):
        at = begin // row
        for offsets, sizes in boxes(shape[1:], begin - at * row, end - at * row):
            yield ((at, *offsets), (1, *sizes))
        if number == 0 and first < last:
            yield ((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))


# Reading -----------------------------------------------------------------------------------------


class Parts:
    """A checkpoint of any number of hosts, of which tensors are read one at a time.

    Args:
        path: The folder.
        map_location: As in `torch.load`, for what is not in a tensor of the folder.
        weights_only: As in `torch.load`.

    Attributes:
        checkpoint: Its tensors have memory and no values.

    Raises:
        CheckpointError: A file is missing or damaged, or it holds objects that `weights_only`
            forbids.
    """

    def __init__(
        self, path: Path, *, map_location: Any = None, weights_only: bool | None = None
    ) -> None:
        self._path, self._reader = path, _Reader(path)
        self._planner = _LoadPlanner(path, map_location=map_location, weights_only=weights_only)
        self._tensors: dict[str, Tensor] = {}
        self._unread: dict[int, str] = {}
        with self._damage_explained():
            self._metadata = self._reader.read_metadata()
            _check_files(path, self._metadata)
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            if _STRUCTURE not in self._metadata.state_dict_metadata:
                raise CheckpointError(
                    f"The checkpoint {path} is one of torch.distributed.checkpoint that another "
                    "program wrote, without a Lightning checkpoint in it. Make it one file with "
                    "its own tools first."
                )
            structure = self._read(_STRUCTURE, None)
            self.checkpoint: dict[str, Any] = tree_map(
                self._tensor, structure, is_leaf=is_reference
            )

    def fill(self, storage: torch.UntypedStorage) -> bool:
        """Read what belongs into a tensor's memory, once; return whether that was now."""
        name = self._unread.pop(storage._cdata, None)  # noqa: SLF001 - torch's key for a storage
        if name is not None:
            with self._damage_explained():
                self._read(name, self._tensors[name])
        return name is not None

    def read(self) -> dict[str, Any]:
        """Return the checkpoint with all values."""
        for tensor in self._tensors.values():
            self.fill(tensor.untyped_storage())
        return self.checkpoint

    def _read(self, name: str, into: Any) -> Any:
        self._planner.set_up_planner({name: into}, self._metadata, is_coordinator=True)
        self._reader.read_data(self._planner.create_local_plan(), self._planner).wait()
        return self._planner.state_dict[name]

    def _tensor(self, value: Any) -> Any:
        if not is_reference(value):
            return value
        name = value[REFERENCE]
        if name not in self._tensors:
            entry = self._metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            new = self._tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            self._unread[new.untyped_storage()._cdata] = name  # noqa: SLF001
        return self._tensors[name]

    @contextmanager
    def _damage_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            reason = f"its parts do not fit ({type(error).__name__}: {error})"
            raise unreadable(self._path, reason) from error


def _check_files(path: Path, metadata: Metadata) -> None:
    """Compare sizes and checksums of all that was written."""
    for entry in sorted(metadata.storage_data.values(), key=lambda e: (e.relative_path, e.offset)):
        file = path / entry.relative_path
        if file.resolve().parent != path.resolve():
            raise unreadable(path, f"its {METADATA} leads to {file}, which is outside of it")
        if not file.is_file():
            raise unreadable(path, f"its file {file.name} is missing")
        with file.open("rb") as opened:
            opened.seek(entry.offset)
            content = opened.read(entry.length)
        if len(content) < entry.length:
            raise unreadable(path, f"its file {file.name} is too short")
        damage = find_damage(io.BytesIO(content))
        if damage is not None:
            raise unreadable(path, f"of its file {file.name}, {damage}")


class _Reader(FileSystemReader):
    """Reads metadata without running code that is in them."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            return cast("Metadata", _Unpickler(file).load())


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = isinstance(getattr(torch, name, None), torch.dtype)
        if (module == "torch" and is_dtype) or (module, name) in _HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}")


_HARMLESS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
            *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
}


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, path: Path, *, map_location: Any, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path, self._map_location, self._weights_only = path, map_location, weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = load_file(
            self._path,
            content=value,
            map_location=self._map_location,
            weights_only=self._weights_only,
        )
