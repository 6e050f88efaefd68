"""A checkpoint as a folder of torch.distributed.checkpoint, to which every host writes its part.

```
last.ckpt/
  .metadata                which elements of which tensor lie where, and behind that the size and
                           the digest of each file, and its own; replaced last
  host0-1f3a90c2-0.distcp  "structure": the checkpoint, with references in the place of tensors;
                           the elements that host 0 owns, and tensors that are not divided
  host0-1f3a90c2-1.distcp  more of them: files have a limited size
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

import errno
import io
import json
import math
import os
import pickle
import re
import secrets
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils._pytree import tree_map, tree_map_with_path

from roundpipe_lightning.checkpoint.snapshot import Storage, TakeStorage, record, write_records
from roundpipe_lightning.engine.device.host_memory import check_host_memory
from roundpipe_lightning.engine.update.hosts_update import OwnedPart
from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.files import (
    DIGEST_LENGTH,
    DigestWriter,
    digest_of,
    find_damage,
    name_of,
    new_folder,
    remove_remains,
    replace_folder,
)

METADATA = ".metadata"
_STRUCTURE = "structure"
_REFERENCE = "roundpipe_tensor"
_LEAST_BYTES = 1024  # smaller tensors stay in the structure
_ALIGNMENT = 64  # torch's own, of tensors in a file
_HOW_TO_EXPORT = "roundpipe-export makes a folder of Hugging Face of a checkpoint of either form."

T = TypeVar("T")
Share: TypeAlias = Callable[[Any], Sequence[Any]]
"""Returns every host's object, by rank; all hosts call it."""


@dataclass
class _Group:
    """What lies in the same memory, and is written together."""

    storage: Storage
    items: list[tuple[MetadataIndex, Tensor]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.items)


class Part:
    """What one host writes of a checkpoint: its structure as it is now, tensors by their memory.

    Args:
        checkpoint: On every host with the same tensors; all else is host 0's.
        owned: What this host has of tensors that are divided; host 0 writes all others.
        max_file_bytes: Size of a file; one that has larger memory has no other.
    """

    def __init__(
        self,
        checkpoint: Mapping[str, Any],
        *,
        owned: Iterable[OwnedPart] = (),
        rank: int = 0,
        max_file_bytes: int,
    ) -> None:
        self.rank, self._max_file_bytes = rank, max_file_bytes
        self._groups: dict[int, _Group] = {}
        self._paths: dict[str, tuple[Any, ...]] = {_STRUCTURE: (_STRUCTURE,)}
        self._tensors: dict[str, TensorStorageMetadata] = {}
        parts = {_key(part.whole): part for part in owned}
        names: dict[Any, str] = {}

        def reference(path: tuple[Any, ...], value: Any) -> Any:
            if type(value) is not Tensor or value.requires_grad or not _is_plain(value):
                return value  # stays as it is, in the structure
            part = parts.get(_key(value))
            if part is None and value.untyped_storage().nbytes() < _LEAST_BYTES:
                return value
            keys = tuple(getattr(each, "key", getattr(each, "idx", each)) for each in path)
            key = (_key(value), value.shape, value.stride())
            if key not in names:
                name = ".".join(map(str, keys))
                while name in self._paths:  # {"a.b": ...} beside {"a": {"b": ...}}
                    name += "_"
                names[key], self._paths[name] = name, keys
                self._add(name, value, part)
            return {_REFERENCE: names[key]}

        structure, content = tree_map_with_path(reference, dict(checkpoint)), BytesIO()
        if rank == 0:
            torch.save(structure, content)
        self._structure = content.getbuffer()

    def _add(self, name: str, tensor: Tensor, part: OwnedPart | None) -> None:
        properties = TensorProperties(dtype=tensor.dtype)
        self._tensors[name] = TensorStorageMetadata(properties, tensor.shape, [])
        if part is not None:
            at = 0
            for offsets, sizes in boxes(
                tuple(tensor.shape), part.start, part.start + part.values.numel()
            ):
                values = part.values[at : at + math.prod(sizes)].view(sizes)
                self._put(MetadataIndex(name, offsets), values)
                at += values.numel()
        elif self.rank == 0:
            self._put(MetadataIndex(name, (0,) * tensor.dim()), tensor)

    def _put(self, index: MetadataIndex, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        group = self._groups.setdefault(storage._cdata, _Group(storage))  # noqa: SLF001 - torch's key for a storage
        group.items.append((index, tensor))

    def copy_all_but(self, kept: Collection[int]) -> list[Storage]:
        """Copy the memory that is written, but for storages with these keys; return those."""
        for key, group in self._groups.items():
            if key not in kept:
                group.storage = group.storage.clone()
                group.items = [(i, _in_memory(group.storage, tensor)) for i, tensor in group.items]
        return [group.storage for key, group in self._groups.items() if key in kept]

    def write(self, folder: Path, *, version: str, take: TakeStorage) -> list[_File]:
        """Write this host's files; return what lies where in them."""
        written: list[_File] = []
        files: list[list[_Group]] = [[]]
        for group in self._groups.values():
            num_bytes = sum(each.num_bytes for each in files[-1])
            if files[-1] and num_bytes + group.num_bytes > self._max_file_bytes:
                files.append([])
            files[-1].append(group)
        for number, groups in enumerate(files):
            path = folder / f"host{self.rank}-{version}-{number}.distcp"
            places: dict[MetadataIndex, tuple[torch.Size, _StorageInfo]] = {}
            with path.open("xb") as opened, DigestWriter(opened) as file:
                if number == self.rank == 0:
                    file.write(bytes(self._structure))
                    place = _StorageInfo(path.name, 0, file.num_bytes)
                    places[MetadataIndex(_STRUCTURE)] = torch.Size(), place
                for group in groups:
                    with take(group.storage) as memory:
                        for index, tensor in group.items:
                            file.write(bytes(-file.num_bytes % _ALIGNMENT))  # to map tensors
                            begin = file.num_bytes
                            values = _compact(_in_memory(memory, tensor))
                            write_records(record(values), file, take=nullcontext)
                            place = _StorageInfo(path.name, begin, file.num_bytes - begin)
                            places[index] = tensor.shape, place
                opened.flush()
                os.fsync(opened.fileno())
                written.append(_File(path.name, file.num_bytes, file.digest, places))
        return written

    def metadata(self, files: Sequence[_File]) -> bytes:
        """Return the description of what all hosts have written, with the digests behind it."""
        described: dict[str, Any] = {**self._tensors, _STRUCTURE: BytesStorageMetadata()}
        places = {}
        for index, (sizes, place) in chain.from_iterable(file.places.items() for file in files):
            places[index] = place
            if index.offset is not None:
                described[index.fqn].chunks.append(ChunkStorageMetadata(index.offset, sizes))
        metadata = Metadata(
            described, planner_data=self._paths, storage_data=places, version="1.0.0"
        )
        digests = {file.name: [file.num_bytes, file.digest] for file in files}
        content = pickle.dumps(metadata) + _DIGESTS + json.dumps(digests).encode()
        return content + digest_of(BytesIO(content), len(content)).encode()


@dataclass(frozen=True)
class _File:
    """A file that a host has written: what tensors, or parts of them, lie where in it."""

    name: str
    num_bytes: int
    digest: str
    places: Mapping[MetadataIndex, tuple[torch.Size, _StorageInfo]]


_DIGESTS = b"\nroundpipe xxh3_128="
"""Stands between the pickle, behind which readers of torch do not look, and a JSON of digests."""


def write_folder(
    part: Part, path: Path, *, share: Share | None = None, take: TakeStorage = nullcontext
) -> None:
    """Write a checkpoint; every host calls this.

    Args:
        path: The folder, on a file system that all hosts have; host 0's counts.
        share: Reaches the others; None where there are none.
        take: Gives the memory to write, once for every storage.

    Raises:
        OSError: It could not be written, without others.
        CheckpointError: A host could not write its part; on all of them.
    """

    def on_all(task: Callable[[], T]) -> Sequence[T]:
        """Return what every host's task gave; raise on all hosts if one failed."""
        if share is None:
            return [task()]
        try:
            done, error = task(), None
        except (OSError, RuntimeError) as raised:
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
            if part.rank > 0:
                return None
            make_place(path)
            return stack.enter_context(new_folder(path)), secrets.token_hex(4)

        first = on_all(begin)[0]
        assert first is not None
        folder, version = first

        def write() -> list[_File]:
            if not folder.is_dir():
                raise FileNotFoundError(0, "the folder is not there, on a disk of its own perhaps")
            return part.write(folder, version=version, take=take)

        written = on_all(write)

        def finish() -> None:
            if part.rank == 0:
                with (folder / METADATA).open("xb") as file:
                    file.write(part.metadata([*chain.from_iterable(written)]))
                    file.flush()
                    os.fsync(file.fileno())
                replace_folder(folder, path, index=METADATA, suffix=".distcp")

        on_all(finish)


def make_place(path: Path) -> None:
    """Make room for a checkpoint; OSError: a folder of other files is there, which stays."""
    is_folder = path.is_dir() and not path.is_symlink()
    if is_folder and not is_checkpoint_folder(path) and any(path.iterdir()):
        raise OSError(errno.ENOTEMPTY, "a folder with other files is there")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_remains(path)


def _is_plain(tensor: Tensor) -> bool:
    differs = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized  # from its memory
    return tensor.layout is torch.strided and tensor.is_cpu and not differs


def _key(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    """Return what two tensors have in common that are the same memory."""
    return (tensor.data_ptr(), tensor.numel(), tensor.dtype)


def _in_memory(memory: Storage, like: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(memory, like.storage_offset(), like.shape, like.stride())


def _compact(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has its elements in order, and no others."""
    is_compact = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_compact else tensor.clone(memory_format=torch.contiguous_format)


def boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut elements `start` to `stop` of a flattened tensor into boxes: offsets and sizes."""
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


def is_checkpoint_folder(path: Path) -> bool:
    return (path / METADATA).is_file()


class Folder:
    """A checkpoint of any number of hosts; tensors stay in their files until they are used.

    Those that several boxes make up are put together one at a time.

    Args:
        map_location: As in `torch.load`, for what is not in a tensor of the folder.

    Attributes:
        checkpoint: Tensors of several boxes have memory and no values yet.

    Raises:
        CheckpointError: It is no checkpoint, a file is missing, damaged or lies outside the folder,
            or it holds objects that `weights_only` forbids.
    """

    def __init__(
        self, path: Path, *, map_location: Any = None, weights_only: bool | None = None
    ) -> None:
        check_form(path)
        self._path = path
        self._tensors: dict[str, Tensor] = {}
        self._unread: dict[int, str] = {}
        with self._damage_explained():
            self._open()
            place = self._metadata.storage_data[MetadataIndex(_STRUCTURE)]
            structure = load_file(
                BytesIO(self._content(place)),
                path,
                map_location=map_location,
                weights_only=weights_only,
            )
            self.checkpoint: dict[str, Any] = tree_map(
                self._tensor, structure, is_leaf=_is_reference
            )
        if self._digests is None:
            warnings.warn(
                f"The checkpoint {path} has no digests: an earlier version or another program has "
                "written it. A flipped bit in it may go unseen.",
                stacklevel=2,
            )

    def _open(self) -> None:
        """Read the index and map all files, of one save: another may take its place meanwhile."""
        content = b""
        while True:
            before, content = content, (self._path / METADATA).read_bytes()
            self._metadata, self._digests = self._index(content)
            places: Any = self._metadata.storage_data.values()
            names = {place.relative_path for place in places} | {*(self._digests or ())}
            try:
                self._files = {name: self._map(name) for name in sorted(names)}
                return
            except FileNotFoundError as error:
                if content == before:
                    name = Path(error.filename).name
                    raise unreadable(self._path, f"its file {name} is missing") from error

    def _index(self, content: bytes) -> tuple[Metadata, dict[str, list[Any]] | None]:
        """Read the index, and the sizes and digests of files; None: an earlier version wrote it."""
        pickled, mark, listed = content.rpartition(_DIGESTS)
        digests = None
        if mark:
            own = content[-DIGEST_LENGTH:].decode("ascii", "replace")
            num_bytes = len(content) - DIGEST_LENGTH
            if own != digest_of(BytesIO(content), num_bytes):
                raise unreadable(self._path, f"{METADATA} differs from its digest")
            digests = json.loads(listed[:-DIGEST_LENGTH])
        elif content[-1:] != pickle.STOP:
            raise unreadable(self._path, f"{METADATA} does not end as it was written")
        else:
            pickled = content
        metadata: Metadata = _Unpickler(BytesIO(pickled)).load()
        if MetadataIndex(_STRUCTURE) not in metadata.storage_data:
            raise CheckpointError(
                f"The checkpoint {self._path} is one of torch.distributed.checkpoint that another "
                "program wrote, without a Lightning checkpoint in it. Make it one file with "
                "its own tools first."
            )
        return metadata, digests

    def _map(self, name: str) -> Storage | None:
        """Return the memory of a file, compared with its digest; None: it is empty.

        FileNotFoundError: it is not there.
        """
        if not re.fullmatch(r"[\w.-]{1,200}", name, re.ASCII):
            raise unreadable(self._path, f"{METADATA} names the file {name!r:.80}")
        path = self._path / name
        if path.resolve().parent != self._path.resolve():
            raise unreadable(self._path, f"its {METADATA} leads to {path}, which is outside of it")
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError(errno.ENOENT, "no file", str(path))
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if self._digests is not None:
                expected, digest = self._digests[name]
                if num_bytes != expected:
                    sizes = f"has {num_bytes:,} bytes instead of {expected:,}"
                    raise unreadable(self._path, f"its file {name} {sizes}")
                if digest != digest_of(file, num_bytes):
                    raise unreadable(self._path, f"its file {name} differs from its digest")
            if not num_bytes:
                return None
            mapped = Storage.from_file(name_of(file), shared=False, nbytes=num_bytes)
            return cast("Storage", mapped)

    def _content(self, place: _StorageInfo) -> memoryview:
        """Return what lies in a place, without a copy."""
        storage = self._files[place.relative_path]
        begin, end = place.offset, place.offset + place.length
        if storage is None or not 0 <= begin < end <= storage.nbytes():
            raise unreadable(self._path, f"its file {place.relative_path} is too short")
        values = torch.empty(0, dtype=torch.uint8).set_(storage)
        memory: Any = values[begin:end].numpy()
        content = memoryview(memory)
        if self._digests is None:
            damage = find_damage(BytesIO(content))
            if damage is not None:
                raise unreadable(self._path, f"of its file {place.relative_path}, {damage}")
        return content

    def fill(self, storage: Storage) -> bool:
        """Put a tensor together in its memory, once; return whether that was now."""
        name = self._unread.pop(storage._cdata, None)  # noqa: SLF001 - torch's key for a storage
        if name is not None:
            whole = self._tensors[name]
            with self._damage_explained():
                entry: Any = self._metadata.state_dict_metadata[name]
                for box in entry.chunks:
                    ends = [
                        begin + size for begin, size in zip(box.offsets, box.sizes, strict=True)
                    ]
                    into = whole[tuple(map(slice, box.offsets, ends))]
                    into.copy_(self._values(name, box, whole.dtype))
        return name is not None

    def read(self) -> dict[str, Any]:
        """Return the checkpoint with all values; FitError: hosts' parts have no room."""
        check_host_memory(
            sum(self._tensors[name].nbytes for name in self._unread.values()),
            what=f"Putting the parts of {self._path} together",
            way_out="roundpipe-merge makes it one file, whose tensors are read as they are used.",
        )
        for tensor in self._tensors.values():
            self.fill(tensor.untyped_storage())
        return self.checkpoint

    def _tensor(self, value: Any) -> Any:
        if not _is_reference(value):
            return value
        name = value[_REFERENCE]
        if name not in self._tensors:
            entry: Any = self._metadata.state_dict_metadata[name]
            dtype, chunks = entry.properties.dtype, entry.chunks
            check_tiles(entry.size, chunks)
            if len(chunks) == 1:
                self._tensors[name] = self._values(name, chunks[0], dtype)
            else:
                for chunk in chunks:  # so that there is memory for no more than files have
                    self._values(name, chunk, dtype)
                new = self._tensors[name] = torch.empty(entry.size, dtype=dtype)
                self._unread[new.untyped_storage()._cdata] = name  # noqa: SLF001
        return self._tensors[name]

    def _values(self, name: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        """Return the values of a box, which stay in their file."""
        place = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        content = self._content(place)
        if self._digests is None:
            written = load_file(BytesIO(content), self._path)
            if (written.dtype, written.shape) != (dtype, chunk.sizes):
                raise ValueError(f"{name} is {written.dtype}{tuple(written.shape)} in its file")
        window: Any = _Window(content)
        reader: Any = torch._C.PyTorchFileReader(window)
        num_bytes = chunk.sizes.numel() * dtype.itemsize
        if reader.get_record_size("data/0") != num_bytes:
            raise ValueError(f"{name} has {reader.get_record_size('data/0')} bytes in its file")
        start = place.offset + reader.get_record_offset("data/0")
        file: Any = self._files[place.relative_path]
        values = file[start : start + num_bytes]
        return torch.empty(0, dtype=dtype).set_(values).view(chunk.sizes)

    @contextmanager
    def _damage_explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError):
            raise  # a fault of the disk: what the files say names no places that no disk has
        except Exception as error:
            reason = f"its parts do not fit ({type(error).__name__}: {error})"
            raise unreadable(self._path, reason) from error


def check_form(path: Path) -> None:
    """CheckpointError: it is no folder of a checkpoint."""
    if not path.is_dir():
        found = "is one file already" if path.exists() else "does not exist"
        raise CheckpointError(
            f"The checkpoint {path} {found}: name the folder of one. {_HOW_TO_EXPORT}"
        )
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path} is a folder of Hugging Face, not a checkpoint: use it with from_pretrained or "
            f"model.hub_name={path} model.weights=pretrained. {_HOW_TO_EXPORT}"
        )
    if not is_checkpoint_folder(path):
        raise CheckpointError(
            f"The checkpoint {path} is a folder without {METADATA}: it is not a checkpoint of this "
            "package. One that FSDP or DeepSpeed wrote in parts has to be made one file with their "
            "own tools first."
        )


def _is_reference(value: Any) -> bool:
    return type(value) is dict and _REFERENCE in value


class _Window(io.RawIOBase):
    """Memory as a file, without a copy."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._content))[whence]
        return self._at

    def readinto(self, memory: Any) -> int:
        piece = self._content[self._at : self._at + len(memory)]
        memory[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def check_tiles(shape: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> None:
    """Raise a ValueError if boxes do not lie one behind the other, from the first element on."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = []
    for chunk in chunks:
        begin, last = 0, 0
        for offset, size, most, stride in zip(
            chunk.offsets, chunk.sizes, shape, strides, strict=True
        ):
            if not 0 <= offset <= offset + size <= most:
                raise ValueError(f"a box of {tuple(shape)} ends at {offset + size}")
            begin, last = begin + offset * stride, last + (offset + size - 1) * stride
        count = math.prod(chunk.sizes)
        if count and last - begin + 1 != count:
            raise ValueError(f"a box of {tuple(shape)} has gaps")
        ranges.append((begin, begin + count))
    end = 0
    for begin, stop in sorted(ranges):
        if begin != end and begin != stop:
            raise ValueError(f"elements {min(begin, end)} to {max(begin, end)} are not there once")
        end = max(end, stop)
    if end != math.prod(shape) or not chunks:
        raise ValueError(f"elements {end} to {math.prod(shape)} are missing")


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 - see below
    """Reads an index.

    It is Python's own: C's makes room for as many entries as a number in the pickle says.
    """

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


def load_file(
    file: IO[bytes],
    path: Path,
    *,
    map_location: Any = None,
    weights_only: bool | None = None,
    mmap: bool = False,
) -> Any:
    """As `torch.load`, of an open file; CheckpointError with `path`: it is none, or forbidden."""
    is_zip = zipfile.is_zipfile(file)
    mmap = mmap and is_zip  # torch's old format is none
    file.seek(0)
    try:
        return torch.load(
            name_of(file) if mmap else file,
            map_location=map_location,
            weights_only=weights_only is not False,  # None is what the caller does not decide
            mmap=mmap,
        )
    except OSError:
        raise
    except Exception as error:
        if not is_zip:
            raise unreadable(path, "it is not in torch's format") from error
        if isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"The checkpoint {path} holds objects whose reading could run code: {error} If you "
                "trust who wrote it, read it with weights_only=False (an argument of Trainer.fit), "
                "or merge it with roundpipe-merge --trust."
            ) from error
        raise unreadable(path, f"{type(error).__name__}: {error}") from error


def unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} cannot be read: {reason}. It is truncated or damaged: copy it "
        "again, or resume from another one (ckpt_path=...)."
    )
