"""Open .gguf files: a mapping of names to Tensors whose blocks are views of the mapped file.

The structure is checked on opening (header.py); data is read only where it is used (shard.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from typing import NoReturn

from qgemm.errors import GGUFError, GGUFNotFoundError, NameNotFoundError, not_pickled
from qgemm.files.journal import check_finished
from qgemm.files.paths import PathLike, path_string, shown, shown_path
from qgemm.files.shards import ShardName, shard_name
from qgemm.tensor import Tensor

from . import parts as gguf_parts
from .header import Place
from .layout import SPLIT_COUNT, SPLIT_KEYS, SPLIT_NO, SPLIT_TENSORS, Value, read_value
from .shard import Shard


class Metadata(Mapping[str, Value]):
    """The keys of a file in its order; a value is decoded on look-up.

    Numbers are NumPy scalars (np.uint32(32)), number arrays NumPy arrays, string arrays lists of str, so that
    `qgemm.write` preserves the type of every value. Bytes that are not UTF-8 become surrogate escapes.
    """

    def __init__(self, shard: Shard, places: Mapping[str, Place]) -> None:
        self._shard, self._places = shard, places

    def __getitem__(self, key: str) -> Value:
        if key not in self._places:
            message = f"{shown_path(self._shard.path)}: there is no key"
            raise NameNotFoundError(message, key, self._places, f"; there are {len(self)}, list(file.metadata)")
        return read_value(self._shard.data(), *self._places[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places  # Mapping's default would decode the value

    def __reduce__(self) -> tuple[type[dict[str, Value]], tuple[dict[str, Value]]]:
        """Pickled and copied as a dict of all values, which needs no file."""
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return f"<Metadata: {len(self)} keys>"


class GGUFFile(Mapping[str, Tensor]):
    """An open .gguf file, or all shards of one: a read-only mapping of names to Tensors, in the file's order.

    `qgemm.open` returns it. After `close`, names, formats and shapes stay usable, blocks and metadata do not.
    """

    def __init__(self, shards: list[Shard], part: bool = False) -> None:
        self._shards = shards
        self._places: dict[str, tuple[str, int]] = {}
        stored: dict[str, Tensor] = {}
        for shard in shards:
            for name, tensor in shard.tensors():
                if name in stored:
                    raise self._refusal(shard.path, name, f"is also in {shown_path(self._places[name][0])}")
                stored[name] = tensor
                self._places[name] = shard.path, shard.header.tensors[name].offset
        for shard in shards:
            total = shard.header.split.tensors
            if total not in (None, len(stored)) and not part:
                prefix = f"{shown_path(shard.path)}: key {shown(SPLIT_TENSORS)}"
                raise GGUFError(f"{prefix}: is {total}, there are {len(stored)} tensors")
        # Keys that number shards do not describe the model, and would be wrong in a copy of it.
        hidden = SPLIT_KEYS if len(shards) > 1 or part else ()
        keys = {key: place for key, place in shards[0].header.keys.items() if key not in hidden}
        self._joiner = gguf_parts.Joiner()
        if gguf_parts.VERSION in keys:
            keys, stored = self._joined(keys, stored)
        self._tensors = stored
        self.metadata = Metadata(shards[0], keys)
        self.closed = False

    def _joined(self, keys: dict[str, Place], stored: dict[str, Tensor]) -> tuple[dict[str, Place], dict[str, Tensor]]:
        """The original keys and tensors of a file with tensors in parts."""
        key, rule = gguf_parts.broken_keys_rule(keys, self._shards[0].data())
        if rule:
            raise GGUFError(f"{shown_path(self.path)}: key {shown(key)}: {rule}")
        tensors = self._joiner.joined(stored, lambda name, rule: self._refusal(self._places[name][0], name, rule))
        for name in tensors.keys() - stored.keys():
            self._places[name] = self._places[gguf_parts.first_part(name, tensors[name].format)]
        return gguf_parts.model_keys(keys), tensors

    @staticmethod
    def _refusal(path: str, name: str, rule: str) -> GGUFError:
        return GGUFError(f"{shown_path(path)}: tensor {shown(name)}: {rule}")

    @property
    def path(self) -> str:
        """The path of the file or of the first shard, as given to `open`."""
        return self._shards[0].path

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all shards."""
        return tuple(shard.path for shard in self._shards)

    @property
    def shard_count(self) -> int:
        """The number of shards of the model, by the metadata of this file; 1 for a model in one file."""
        return self._shards[0].header.split.shards

    @property
    def version(self) -> int:
        """The GGUF version, 2 or 3."""
        return self._shards[0].header.version

    @property
    def alignment(self) -> int:
        """The alignment of the tensor data, in bytes."""
        return self._shards[0].header.alignment

    def place(self, name: str) -> tuple[str, int]:
        """The path of the file that holds a tensor, and the offset of its blocks, or of its first part, there."""
        return self._places[name]

    def __reduce__(self) -> NoReturn:
        """TypeError: tensors are pickled, as a path and an offset, open files are not."""
        raise not_pickled(self)

    def close(self) -> None:
        """Close the files. Views of blocks stay valid."""
        self.closed = True
        self._joiner.forget()
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            message = f"{shown_path(self.path)}: there is no tensor"
            raise NameNotFoundError(message, name, self._tensors, "; `qgemm info` lists the names")
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<GGUFFile {self.path!r}: {len(self)} tensors, {len(self.metadata)} keys{state}>"


def open(path: PathLike, *, part: bool = False, copy: bool = False) -> GGUFFile:
    """Open a .gguf file or, given its first shard, a split model; part: a single shard of one.

    The blocks of a tensor are a view of the mapped file, which costs no memory and no time. If another program
    truncates the file while they are read, the system ends the process (SIGBUS). copy: blocks are read into memory on
    first use, and stay there until the file is closed; a truncated file is then an ordinary error. Blocks are also
    copied where the file system has no mappings.

    >>> with qgemm.open("model.gguf") as model:
    ...     weight = model["blk.0.attn_q.weight"]

    Raises GGUFError, naming the file, the tensor or key, and the rule, for a malformed file; its subclass
    GGUFNotFoundError for a missing file, GGUFAccessError for one that cannot be read.
    """
    with ExitStack() as undo:
        try:
            first = undo.enter_context(closing(Shard(path, copy=copy)))
        except GGUFNotFoundError:
            check_finished(path_string(path))
            raise
        shards = [first]
        for sibling in () if part else _siblings(first):
            shard = undo.enter_context(closing(Shard(sibling, copy=copy)))
            number, count, _ = shard.header.split
            if (number, count) != (len(shards), first.header.split.shards):
                prefix = f"{shown_path(sibling)}: key {shown(SPLIT_NO)}"
                raise GGUFError(f"{prefix}: is {number} of {count}, by its name it is {len(shards)} (from 0)")
            shards.append(shard)
        if first.header.split.shards > 1:  # all old or all new, if a writer replaced them meanwhile
            check_finished(first.path)
            for shard in shards:
                shard.check_named()
        file = GGUFFile(shards, part)
        undo.pop_all()
    return file


def _siblings(shard: Shard) -> list[str]:
    """The paths of the other shards of a model, from the first."""
    number, count, _ = shard.header.split
    if count == 1:
        return []
    name, prefix = shard_name(shard.path, ".gguf"), shown_path(shard.path)
    if name is None or (name.number, name.shards) != (number + 1, count):
        end = ShardName("", number + 1, count, ".gguf").path(number + 1)
        raise GGUFError(f"{prefix}: key {shown(SPLIT_COUNT)}: is {count}, but the name does not end in {end}")
    if number:
        raise GGUFError(f"{prefix}: is shard {number + 1} of {count}: open the first, {shown_path(name.path(1))}")
    return name.paths()[1:]
