"""A DVC remote in S3: moto's server on loopback stands for it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.errors import IntegrityError, RegistryError
from pipeline.registry.gc import collect
from pipeline.registry.promote import promote
from pipeline.registry.pull import fetch_file, pull
from pipeline.registry.store import BLOCK, Object, Store, remote_store
from tests.func.registry.conftest import FAMILY, clone, commit, dvc, run_again, shell


@pytest.fixture
def bucket(s3: Any, shared: Path) -> Any:
    """The shared project's DVC remote is a bucket; returns the client."""
    project = Path()
    s3.create_bucket(Bucket="engines")
    dvc(project, "remote", "add", "-q", "--force", "--default", "store", "s3://engines/shop")
    dvc(project, "remote", "modify", "store", "endpointurl", s3.meta.endpoint_url)
    commit(project)
    shell(project, "git", "push", "-q", "origin", "main")
    assert not (shared / "store").exists()
    return s3


def key(content: bytes) -> str:
    md5 = hashlib.md5(content).hexdigest()
    return f"shop/files/md5/{md5[:2]}/{md5[2:]}"


def test_promote_pull_verify_and_clean_up(bucket: Any, shared: Path) -> None:
    done = promote(Path(), stage="production")[0][0]
    assert bucket.get_object(Bucket="engines", Key=key(b"int8_mixed"))["Body"].read() == b"int8_mixed"
    serving = clone(shared, "serving")
    found = pull(serving, f"{FAMILY}#production")
    assert (found.digest, (found.folder / "model.onnx").read_bytes()) == (done.digest, b"graph")
    os.chdir(serving)
    assert main(["verify", FAMILY]) == 0

    # DVC's own idea of what is there is not asked: an object that went is noticed and pushed again.
    bucket.delete_object(Bucket="engines", Key=key(b"graph"))
    assert main(["verify", FAMILY]) == IntegrityError.exit_code
    assert promote(shared / "Shop.Translator")[0][0].action == "already"
    assert main(["verify", FAMILY]) == 0
    bucket.put_object(Bucket="engines", Key=key(b"graph"), Body=b"Graph")
    assert main(["verify", FAMILY]) == IntegrityError.exit_code
    bucket.put_object(Bucket="engines", Key=key(b"graph"), Body=b"graph")

    # An engine that was pushed and never registered goes; the others stay.
    project = shared / "Shop.Translator"
    run_again(project, b"never registered")
    dvc(project, "push", "-q")
    run_again(project, b"present")
    garbage = collect(project, remote="store", delete=True)[1]
    assert hashlib.md5(b"never registered").hexdigest() in garbage.objects
    left = {row["Key"] for row in bucket.list_objects_v2(Bucket="engines")["Contents"]}
    assert key(b"never registered") not in left
    assert {key(b"graph"), key(b"int8_mixed")} <= left
    assert main(["verify", FAMILY]) == 0


def test_an_upload_over_a_broken_object(bucket: Any) -> None:
    """An object of the wrong size is put again; one that reads otherwise stops the promotion."""
    bucket.put_object(Bucket="engines", Key=key(b"int8_mixed"), Body=b"int8")
    assert promote(Path())[0][0].action == "registered"
    assert bucket.get_object(Bucket="engines", Key=key(b"int8_mixed"))["Body"].read() == b"int8_mixed"


def test_no_bucket_no_promotion(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setenv("AWS_CONFIG_FILE", os.devnull)
        with pytest.raises(RegistryError, match="DVC remote store: .*config file"):
            promote(Path())
    bucket.delete_bucket(Bucket="engines")
    with pytest.raises(RegistryError, match="s3://engines/shop"):
        promote(Path())
    assert shell(Path(), "git", "tag") == ""


def test_it_goes_on_in_the_middle_of_an_object(bucket: Any, tmp_path: Path) -> None:
    content = os.urandom(2 * BLOCK + 1000)
    bucket.put_object(Bucket="engines", Key=key(content), Body=content)
    one = Object(hashlib.md5(content).hexdigest(), len(content))
    digest, target = f"sha256:{hashlib.sha256(content).hexdigest()}", tmp_path / "weights"
    store = remote_store(Path())
    assert isinstance(store, Store)
    target.write_bytes(content[: BLOCK + 77])
    fetched: list[int] = []
    fetch_file(store, one, target, digest, fetched.append)
    assert target.read_bytes() == content
    assert sum(fetched) == len(content)
    assert fetched[:2] == [BLOCK, 77]  # what was on the disk
