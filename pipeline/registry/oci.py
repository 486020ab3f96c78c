"""A copy of a registered engine in an OCI registry, through ``oras``: files as blobs, evidence as referrers.

The engine is an artifact ``HOST/REPOSITORY/ARTIFACT:VERSION`` whose layers are the engine's files. An OCI registry
names a blob by its SHA-256, which is what the manifest names a file by, so a copy needs no table. Manifest, provenance,
bill of materials and signature refer to it by ``subject``. Formats: OCI image-spec 1.1 and distribution-spec 1.1; for
a registry without the referrers API, the list is kept under the referrers tag, as the latter asks of a client.

The git tags stay the registry: what is copied is registered already, and `pull` resolves and trusts as always.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from pipeline.engines.manifest import FILE, PROVENANCE_FILE, SBOM_FILE, SIGNATURE_FILE
from pipeline.errors import IntegrityError, RegistryError, UsageError
from pipeline.files import canonical_json
from pipeline.registry.store import BLOCK

IMAGE = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
ENGINE = "application/vnd.enginegate.engine.v1"
TYPES = {
    FILE: "application/vnd.enginegate.manifest.v1+json",
    PROVENANCE_FILE: "application/vnd.in-toto+json",
    SBOM_FILE: "application/vnd.cyclonedx+json",
    SIGNATURE_FILE: "application/vnd.dev.sigstore.bundle.v0.3+json",
}


@dataclass(frozen=True)
class OciRepository:
    """One repository of an OCI registry. Credentials are those of ``docker login``."""

    client: Any
    container: Any
    prefix: str  # http:// or https:// with the host
    name: str

    @property
    def label(self) -> str:
        """For people."""
        return f"OCI repository {self.container.registry}/{self.name}"

    def size(self, digest: str) -> int | None:
        """Bytes of a blob, None when it is not there."""
        answer = self._ask("HEAD", f"blobs/{digest}", also=(404,))
        return None if answer.status_code == 404 else int(answer.headers["Content-Length"])

    def copy(self, digest: str, file: FileIO, moved: Callable[[int], object]) -> None:
        """Writes to ``file`` what follows the position where it stands."""
        start = file.tell()
        ask = {"Range": f"bytes={start}-"} if start else {}
        with self._ask("GET", f"blobs/{digest}", headers=ask, stream=True, also=(206, 404)) as answer:
            if answer.status_code == 404:
                raise IntegrityError(f"{self.label} has no blob {digest}", "`enginegate promote --oci` copies it again")
            skip = start if answer.status_code == 200 else 0  # a registry that does not know ranges sends it all
            for block in answer.iter_content(BLOCK):
                part = block[skip:]
                skip -= len(block) - len(part)
                file.write(part)
                moved(len(part))

    def put(self, file: Path, digest: str, size: int) -> None:
        """Uploads a blob in chunks unless it is there; the registry checks its digest."""
        if self.size(digest) == size:
            return
        try:
            answer = self.client.chunked_upload(str(file), self.container, {"digest": digest, "size": size})
        except Exception as error:  # requests' and oras' errors have no common base
            raise RegistryError(f"{self.label}: {error}", "check the address, and `docker login`") from error
        self._expect(answer, (201,), f"upload of {file.name}")

    def put_bytes(self, content: bytes, media_type: str) -> dict[str, Any]:
        """Uploads a small blob; returns its descriptor."""
        descriptor = describe(content, media_type)
        if self.size(descriptor["digest"]) is None:
            session = self._ask("POST", "blobs/uploads/").headers["Location"]
            address = session if session.startswith("http") else f"{self.prefix}{session}"
            address += f"{'&' if '?' in address else '?'}digest={descriptor['digest']}"
            self._ask("PUT", address, data=content, headers={"Content-Type": "application/octet-stream"})
        return descriptor

    def put_manifest(self, content: Mapping[str, Any], reference: str | None = None) -> tuple[dict[str, Any], Any]:
        """Uploads a manifest under its digest, or ``reference``; returns its descriptor and the answer."""
        raw, media_type = canonical_json(content), content["mediaType"]
        descriptor = describe(raw, media_type)
        place = f"manifests/{reference or descriptor['digest']}"
        return descriptor, self._ask("PUT", place, data=raw, headers={"Content-Type": media_type})

    def get_manifest(self, reference: str) -> dict[str, Any] | None:
        """A manifest or index, None when it is not there."""
        answer = self._ask("GET", f"manifests/{reference}", headers={"Accept": f"{IMAGE}, {INDEX}"}, also=(404,))
        found: dict[str, Any] | None = None if answer.status_code == 404 else answer.json()
        return found

    def _ask(
        self,
        method: str,
        place: str,
        *,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
        stream: bool = False,
        also: tuple[int, ...] = (),
    ) -> Any:
        address = place if place.startswith("http") else f"{self.prefix}/v2/{self.name}/{place}"
        try:
            answer = self.client.do_request(address, method, data=data, headers=headers or {}, stream=stream)
        except Exception as error:  # requests' and oras' errors have no common base
            raise RegistryError(f"{self.label}: {error}", "check the address, and `docker login`") from error
        return self._expect(answer, (200, 201, 202, *also), place)

    def _expect(self, answer: Any, good: tuple[int, ...], what: str) -> Any:
        if answer.status_code not in good:
            raise RegistryError(
                f"{self.label}: {what}: {answer.status_code} {answer.text[:200]}", "check the address and your access"
            )
        return answer


@dataclass(frozen=True)
class OciSource:
    """An OCI repository as a source of the DVC objects of one engine."""

    repository: OciRepository
    digests: Mapping[str, str]  # MD5 -> SHA-256

    @property
    def label(self) -> str:
        """For people."""
        return self.repository.label

    def copy(self, md5: str, file: FileIO, moved: Callable[[int], object]) -> None:
        """Writes to ``file`` what follows the position where it stands."""
        self.repository.copy(self.digests[md5], file, moved)


def open_repository(target: str, artifact: str) -> OciRepository:
    """The repository of an artifact under ``HOST/PATH``, or ``http://HOST/PATH`` for a registry without TLS.

    Raises UsageError for what is no address, RegistryError when ``oras`` is not installed.
    """
    plain = target.startswith("http://")
    host, _, path = target.removeprefix("http://").removeprefix("https://").strip("/").partition("/")
    if not host or not path or any(sign in target for sign in "@# "):
        raise UsageError(f"--oci {target}: not an address", "write HOST/PATH, such as registry.example.org/engines")
    try:
        from oras.container import Container
        from oras.provider import Registry
    except ImportError as error:
        raise RegistryError(f"--oci needs oras: {error}", "pip install 'enginegate[oci]'") from error

    class Client(Registry):  # type: ignore[misc]
        # Without the library's own retries, which go on for two minutes when nobody answers.
        do_request = Registry.do_request.__wrapped__

    client = Client(hostname=host, insecure=plain)
    name = f"{path}/{artifact.lower()}"
    container = Container(f"{host}/{name}", registry=host)
    client.auth.load_configs(container)
    return OciRepository(client, container, f"{'http' if plain else 'https'}://{host}", name)


def describe(content: bytes, media_type: str) -> dict[str, Any]:
    """An OCI descriptor."""
    return {
        "mediaType": media_type,
        "digest": f"sha256:{hashlib.sha256(content).hexdigest()}",
        "size": len(content),
    }


def copy_engine(
    repository: OciRepository, manifest: Mapping[str, Any], folder: Path, companions: Mapping[str, bytes]
) -> str:
    """Copies a registered engine from ``folder``; returns the OCI digest. The version's tag is set last.

    Raises RegistryError when the registry refuses something.
    """
    objects = manifest["registration"]["objects"]
    layers = []
    for name, digest in sorted(manifest["files"].items()):
        size = objects[name]["size"]
        repository.put(folder / name, digest, size)
        title = {"org.opencontainers.image.title": name}
        layers.append({"mediaType": "application/octet-stream", "digest": digest, "size": size, "annotations": title})
    engine = {
        "schemaVersion": 2,
        "mediaType": IMAGE,
        "artifactType": ENGINE,
        "config": repository.put_bytes(b"{}", EMPTY),
        "layers": layers,
        "annotations": {"org.opencontainers.image.version": manifest["registration"]["version"]},
    }
    subject = repository.put_manifest(engine)[0]
    for name, content in companions.items():
        _refer(repository, subject, name, content)
    repository.put_manifest(engine, manifest["registration"]["version"])
    return str(subject["digest"])


def _refer(repository: OciRepository, subject: dict[str, Any], name: str, content: bytes) -> None:
    """Attaches one piece of evidence to the engine."""
    blob = repository.put_bytes(content, TYPES[name]) | {"annotations": {"org.opencontainers.image.title": name}}
    referrer = {
        "schemaVersion": 2,
        "mediaType": IMAGE,
        "artifactType": TYPES[name],
        "config": repository.put_bytes(b"{}", EMPTY),
        "layers": [blob],
        "subject": subject,
    }
    descriptor, answer = repository.put_manifest(referrer)
    if "OCI-Subject" in answer.headers:
        return  # the registry keeps the list
    tag = subject["digest"].replace(":", "-")
    index = repository.get_manifest(tag) or {"schemaVersion": 2, "mediaType": INDEX, "manifests": []}
    entry = descriptor | {"artifactType": TYPES[name]}
    if entry not in index["manifests"]:
        repository.put_manifest(index | {"manifests": [*index["manifests"], entry]}, tag)


def check_copy(repository: OciRepository, manifest: Mapping[str, Any]) -> None:
    """Raises IntegrityError when the registry lacks a file of the engine. It checked each digest as it came in."""
    for name, digest in manifest["files"].items():
        if repository.size(digest) != manifest["registration"]["objects"][name]["size"]:
            raise IntegrityError(f"{repository.label} lacks {name}", "`enginegate promote --oci` copies it again")
