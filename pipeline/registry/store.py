"""Where an engine's bytes are: a DVC remote or the DVC cache, both addressed by MD5 (``files/md5/ab/cdef...``).

Objects are asked of the store itself. DVC keeps an index of what it pushed and trusts it; an object that somebody
deleted since would still count as pushed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import EnginegateError, IntegrityError, RegistryError

BLOCK = 1 << 20
CHUNK = 16 << 20
JOBS = 4  # files at once


@dataclass(frozen=True)
class Object:
    """A file as the store knows it."""

    md5: str
    size: int


class Source(Protocol):
    """Where a pull reads from."""

    @property
    def label(self) -> str:
        """For people."""

    def copy(self, md5: str, file: FileIO, moved: Callable[[int], object]) -> None:
        """Writes to ``file`` what follows the position where it stands; tells ``moved`` how much came, as it comes."""


@dataclass(frozen=True)
class Store:
    """One place that holds objects."""

    fs: Any  # DVC's file system
    path: str
    label: str  # for people, without credentials

    def place(self, md5: str) -> str:
        """The path of an object."""
        return str(self.fs.join(self.path, "files", "md5", md5[:2], md5[2:]))

    def size(self, md5: str) -> int | None:
        """Bytes of an object, None when the store has none."""
        with self._answers():
            try:
                return int(self.fs.info(self.place(md5))["size"])
            except FileNotFoundError:
                return None

    def missing(self, objects: Mapping[str, Object]) -> list[str]:
        """Names whose object is not in the store, or not with its size."""
        names = sorted(objects)
        with ThreadPoolExecutor(JOBS) as pool:
            sizes = list(pool.map(lambda name: self.size(objects[name].md5), names))
        return [name for name, size in zip(names, sizes, strict=True) if size != objects[name].size]

    def put(self, file: Path, md5: str) -> None:
        """Writes an object; DVC's file systems make it appear whole or not at all."""
        with self._answers():
            self.fs.makedirs(self.fs.parent(self.place(md5)))
            self.fs.put_file(str(file), self.place(md5))

    def blocks(self, md5: str, start: int = 0) -> Iterator[memoryview]:
        """The bytes of an object from ``start`` on; a block is good until the next is asked for."""
        buffer = bytearray(BLOCK)  # one for all: new memory for each block costs more than the copy
        with self._answers(md5), self.fs.open(self.place(md5), "rb") as file:
            if start:
                file.seek(start)
            while count := file.readinto(buffer):
                yield memoryview(buffer)[:count]

    def read(self, md5: str) -> bytes:
        """A small object."""
        return b"".join(bytes(block) for block in self.blocks(md5))

    def digest(self, md5: str, advance: Callable[[int], object] = lambda _: None) -> str:
        """``sha256:<hex>`` of what the store gives back."""
        hashed = hashlib.sha256()
        for block in self.blocks(md5):
            hashed.update(block)
            advance(len(block))
        return f"sha256:{hashed.hexdigest()}"

    def copy(self, md5: str, file: FileIO, moved: Callable[[int], object]) -> None:
        """Writes to ``file`` what follows the position where it stands; tells ``moved`` how much came, as it comes."""
        start = file.tell()
        if isinstance(self.fs, _local_fs()):  # within the kernel, which costs half
            with self._answers(md5), open(self.place(md5), "rb") as source:  # noqa: PTH123
                size = os.fstat(source.fileno()).st_size
                while start < size:
                    count = os.sendfile(file.fileno(), source.fileno(), start, CHUNK)
                    if not count:
                        break  # cut while it was read; the digest tells
                    start += count
                    moved(count)
            return
        for block in self.blocks(md5, start):
            file.write(block)
            moved(len(block))

    def remove(self, md5: str) -> None:
        """Deletes an object."""
        with self._answers(md5):
            self.fs.remove(self.place(md5))

    @contextlib.contextmanager
    def _answers(self, md5: str = "") -> Iterator[None]:
        """Turns what the many file systems raise into two errors: an object is lost, or the store does not answer."""
        try:
            yield
        except EnginegateError:
            raise
        except Exception as error:
            if md5 and isinstance(error, FileNotFoundError):
                raise IntegrityError(
                    f"{self.label} has no object {md5}", "`enginegate verify` says whose it is"
                ) from error
            raise RegistryError(
                f"{self.label}: {type(error).__name__}: {error}", "check the connection, the credentials and the disk"
            ) from error


def remote_store(root: Path, name: str | None = None) -> Store | None:
    """A DVC remote, the default one when ``name`` is None; None when there is no default.

    Raises RegistryError for an unknown remote, one whose DVC extension is not installed, or one that versions files
    in the cloud (it does not address them by content).
    """
    from dvc.fs import get_cloud_fs

    config = _config(root)
    name = name or config["core"].get("remote")
    if name is None:
        return None
    try:
        kind, options, path = get_cloud_fs(config, name=name)
        if options.get("version_aware") or options.get("worktree"):
            raise RegistryError(f"DVC remote {name} is cloud-versioned", "name one that is not: --remote NAME")
        fs = kind(**options)
        label = f"DVC remote {name} ({fs.unstrip_protocol(path)})"
        fs.fs  # noqa: B018  (connects; a missing extension or a wrong key shows here)
    except RegistryError:
        raise
    except Exception as error:  # DVC's, its extensions' and their clients' errors have no common base
        raise RegistryError(
            f"DVC remote {name}: {error}", "`dvc remote list`; pip install dvc-s3 (-gs, -azure)"
        ) from error
    return Store(fs, path, label)


def _local_fs() -> Any:
    from dvc.fs import LocalFileSystem

    return LocalFileSystem


def cache_store(root: Path) -> Store:
    """DVC's cache on this machine."""
    from dvc.fs import localfs

    path = _config(root)["cache"].get("dir") or str(root.resolve() / ".dvc" / "cache")
    return Store(localfs, path, f"DVC cache ({path})")


def _config(root: Path) -> Any:
    from dvc.config import Config

    folder = root.resolve() / ".dvc"
    if not folder.is_dir():
        raise RegistryError(f"{root.resolve()}: no .dvc folder", "run the command in the root of the project's clone")
    return Config(str(folder))


def copy_and_hash(store: Source, md5: str, target: Path, hashed: Any, moved: Callable[[int], object]) -> None:
    """Completes ``target``, whose bytes so far are in ``hashed``, with the rest of an object.

    Hashed is what was written, read back from the file by a thread that follows the copy.
    """
    start = target.stat().st_size
    written: queue.Queue[int | None] = queue.Queue()

    def follow() -> None:
        with target.open("rb", buffering=0) as file:
            place, buffer = start, memoryview(bytearray(BLOCK))
            file.seek(start)
            while (end := written.get()) is not None:
                while place < end and (count := file.readinto(buffer[: end - place])):
                    hashed.update(buffer[:count])
                    place += count

    with target.open("r+b", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        place = file.seek(start)

        def note(count: int) -> None:
            nonlocal place
            place += count
            written.put(place)
            moved(count)

        following = pool.submit(follow)
        try:
            store.copy(md5, file, note)
        finally:
            written.put(None)
        following.result()
