"""A copy in a real OCI registry: Debian's docker-registry, which has no referrers API. Skipped where it is absent."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.errors import IntegrityError, RegistryError, UsageError
from pipeline.registry.oci import OciSource, open_repository
from pipeline.registry.promote import promote
from pipeline.registry.pull import fetch_file, pull
from pipeline.registry.signing import Verifier
from pipeline.registry.store import Object
from tests.func.registry.conftest import ARTIFACT, FAMILY, clone

PROGRAM = shutil.which("docker-registry")
pytestmark = [
    pytest.mark.oci,
    pytest.mark.skipif(PROGRAM is None, reason="docker-registry is not installed (apt-get install docker-registry)"),
]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """An empty registry on a free port of loopback; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "version": "0.1",
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "oci")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (tmp_path / "oci.yml").write_text(json.dumps(config), encoding="utf-8")
    with (tmp_path / "oci.log").open("wb") as log:
        process = subprocess.Popen([str(PROGRAM), "serve", str(tmp_path / "oci.yml")], stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(f"{address}/v2/", process)
        yield f"{address}/engines"
    finally:
        process.terminate()
        process.wait(30)


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "docker-registry stopped"
        try:
            urllib.request.urlopen(address, timeout=10).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("docker-registry does not answer")


def get(registry: str, place: str) -> Any:
    """What the registry says to a plain HTTP client."""
    address = f"{registry.replace('/engines', '/v2/engines')}/{ARTIFACT}/{place}"
    accept = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json"
    with urllib.request.urlopen(urllib.request.Request(address, headers={"Accept": accept}), timeout=30) as answer:
        return answer.read(), answer.headers


def test_the_copy_and_its_referrers(shared: Path, registry: str, keys: Path) -> None:
    key = str(keys / "release.pem")
    assert main(["promote", "--oci", registry, "--sign-key", key]) == 0
    raw, headers = get(registry, "manifests/v0.0.1")
    engine = json.loads(raw)
    assert engine["artifactType"] == "application/vnd.enginegate.engine.v1"
    content = {"model.onnx": b"graph", "model.onnx.data": b"int8_mixed", "tokenizer/tokenizer.json": b"{}"}
    assert {layer["annotations"]["org.opencontainers.image.title"]: layer["digest"] for layer in engine["layers"]} == {
        name: f"sha256:{hashlib.sha256(data).hexdigest()}" for name, data in content.items()
    }
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    assert headers["Docker-Content-Digest"] == digest
    index = json.loads(get(registry, f"manifests/{digest.replace(':', '-')}")[0])
    evidence = {}
    for row in index["manifests"]:
        referrer = json.loads(get(registry, f"manifests/{row['digest']}")[0])
        assert referrer["subject"]["digest"] == digest
        assert referrer["artifactType"] == row["artifactType"]
        evidence[row["artifactType"]] = get(registry, f"blobs/{referrer['layers'][0]['digest']}")[0]
    assert sorted(evidence) == [
        "application/vnd.cyclonedx+json",
        "application/vnd.dev.sigstore.bundle.v0.3+json",
        "application/vnd.enginegate.manifest.v1+json",
        "application/vnd.in-toto+json",
    ]
    assert json.loads(evidence["application/vnd.enginegate.manifest.v1+json"])["files"].keys() == content.keys()

    # Again changes nothing; a serving clone needs no DVC remote.
    assert main(["promote", "--oci", registry]) == 0
    assert get(registry, "manifests/v0.0.1")[0] == raw
    assert json.loads(get(registry, f"manifests/{digest.replace(':', '-')}")[0]) == index
    (shared / "store").rename(shared / "away")
    serving = clone(shared, "serving")
    found = pull(serving, FAMILY, oci=registry, verifier=Verifier(keys / "release.pub"))
    assert {name: (found.folder / name).read_bytes() for name in content} == content


def test_what_the_registry_holds_is_not_trusted(shared: Path, registry: str, tmp_path: Path) -> None:
    promote(Path(), oci=registry)
    digest = hashlib.sha256(b"graph").hexdigest()
    blob = tmp_path / "oci/docker/registry/v2/blobs/sha256" / digest[:2] / digest / "data"
    blob.write_bytes(b"Graph")
    serving = clone(shared, "serving")
    with pytest.raises(IntegrityError, match="model.onnx .* has other bytes than were promoted"):
        pull(serving, FAMILY, oci=registry)
    blob.unlink()
    with pytest.raises((IntegrityError, RegistryError), match="OCI repository"):
        pull(serving, FAMILY, oci=registry)
    assert not list((serving / "engines/pulled").glob("[!.]*"))


def test_a_version_that_was_registered_earlier_is_copied(shared: Path, registry: str) -> None:
    assert promote(Path())[0][0].action == "registered"
    assert promote(Path(), oci=registry)[0][0].action == "already"
    assert pull(clone(shared, "serving"), FAMILY, oci=registry).fetched


def test_it_goes_on_in_the_middle_of_a_blob(registry: str, tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000  # 10 MB: more than one chunk of a request
    (tmp_path / "weights").write_bytes(content)
    digest, md5 = f"sha256:{hashlib.sha256(content).hexdigest()}", hashlib.md5(content).hexdigest()
    repository = open_repository(registry, "Any")
    assert repository.size(digest) is None
    repository.put(tmp_path / "weights", digest, len(content))
    assert repository.size(digest) == len(content)
    target = tmp_path / "got"
    target.write_bytes(content[:3_000_000])
    fetch_file(OciSource(repository, {md5: digest}), Object(md5, len(content)), target, digest)
    assert target.read_bytes() == content


def test_addresses(shared: Path, registry: str) -> None:
    for address in ("registry", "http://", "a b/c", "host/repo@sha256:1"):
        with pytest.raises(UsageError, match="not an address"):
            open_repository(address, ARTIFACT)
    host = registry.removeprefix("http://").partition("/")[0]
    promote(Path())
    with pytest.raises(RegistryError, match="OCI repository"):  # TLS where there is none
        pull(clone(shared, "serving"), FAMILY, oci=f"{host}/engines")
