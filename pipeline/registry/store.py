"""Where an engine's bytes are: a DVC remote or the DVC cache, both addressed by MD5 (``files/md5/ab/cdef...``).

Objects are asked of the store itself. DVC keeps an index of what it pushed and trusts it; an object that somebody
deleted since would still count as pushed.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import EnginegateError, IntegrityError, RegistryError

BLOCK = 4 << 20
JOBS = 4  # files at once


@dataclass(frozen=True)
class Object:
    """A file as the store knows it."""

    md5: str
    size: int


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

    def blocks(self, md5: str, start: int = 0) -> Iterator[bytes]:
        """The bytes of an object from ``start`` on, in blocks."""
        with self._answers(md5), self.fs.open(self.place(md5), "rb") as file:
            if start:
                file.seek(start)
            while block := file.read(BLOCK):
                yield block

    def digest(self, md5: str, advance: Callable[[int], object] = lambda _: None) -> str:
        """``sha256:<hex>`` of what the store gives back."""
        hashed = hashlib.sha256()
        for block in self.blocks(md5):
            hashed.update(block)
            advance(len(block))
        return f"sha256:{hashed.hexdigest()}"

    def remove(self, md5: str) -> None:
        """Deletes an object."""
        with self._answers(md5):
            self.fs.remove(self.place(md5))

    @contextlib.contextmanager
    def _answers(self, md5: str = "") -> Iterator[None]:
        try:
            yield
        except EnginegateError:
            raise
        except FileNotFoundError as error:
            if not md5:
                raise
            raise IntegrityError(
                f"{self.label} has no object {md5}", "`enginegate verify` names what is lost"
            ) from error
        except Exception as error:
            raise RegistryError(
                f"{self.label}: {type(error).__name__}: {error}", "check the connection, the credentials and the disk"
            ) from error


def remote_store(root: Path, name: str | None = None) -> Store | None:
    """A DVC remote, the default one when ``name`` is None; None when there is no default.

    Raises RegistryError for an unknown remote, one whose DVC extension is not installed, or one that versions files
    in the cloud (it does not address them by content).
    """
    from dvc.exceptions import DvcException
    from dvc.fs import get_cloud_fs
    from dvc_objects.fs.errors import ConfigError

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
    except (DvcException, ConfigError) as error:
        raise RegistryError(
            f"DVC remote {name}: {error}", "`dvc remote list`; pip install dvc-s3 (-gs, -azure)"
        ) from error
    return Store(fs, path, label)


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


def copy_and_hash(store: Store, md5: str, file: BinaryIO, hashed: Any, advance: Callable[[int], object]) -> None:
    """Appends an object's bytes from where ``file`` stands; a block is hashed while the next is fetched and written."""
    blocks: queue.Queue[bytes | None] = queue.Queue(maxsize=4)

    def hash_blocks() -> None:
        while (block := blocks.get()) is not None:
            hashed.update(block)

    worker = threading.Thread(target=hash_blocks, daemon=True)
    worker.start()
    try:
        for block in store.blocks(md5, file.tell()):
            blocks.put(block)
            file.write(block)
            advance(len(block))
    finally:
        blocks.put(None)
        worker.join()
