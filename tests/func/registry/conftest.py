"""A user's project: a real git repository with DVC, an engine, its verdict and the real stage `promoted`."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.manifest import write_manifest
from pipeline.files import digest_json, write_json
from pipeline.gate.policy import Policy

ROOT = Path(__file__).parents[3]
DVC_YAML = f"""\
stages:
  promoted:
    cmd: {sys.executable} -m stages.promoted
    deps:
      - artifacts/verdicts
    params:
      - recipes
    outs:
      - engines/promoted:
          persist: true
"""


POLICY = Policy()
POLICY_YAML = "require: any  # all else as `Policy()` has it\n"
MACHINE = platform.machine()
FAMILY = "shop-translator-int8_mixed"
ARTIFACT = f"{FAMILY}-onnxruntime-{MACHINE}"


def shell(folder: Path, *command: str) -> str:
    """Runs a command that must succeed; returns what it printed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "DVC_NO_ANALYTICS": "1",
        **{f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dvc(folder: Path, *arguments: str) -> str:
    """Runs DVC."""
    return shell(folder, sys.executable, "-m", "dvc", *arguments)


def reproduce(project: Path) -> None:
    """`dvc repro` within this process, which is a second quicker."""
    from dvc.repo import Repo

    with contextlib.chdir(project), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # DVC's own
        patch.setenv("PYTHONPATH", str(ROOT))
        with Repo(str(project)) as repo:
            repo.reproduce()


def write_engine(folder: Path, name: str, weights: bytes) -> str:
    """An engine of three files; returns its digest."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "model.onnx.data").write_bytes(weights)
    (folder / "tokenizer/tokenizer.json").write_text("{}", encoding="utf-8")
    description = {"name": name, "recipe": name, "backend": "onnxruntime", "dtype": "int8"}
    description |= {"limits": {"max_batch": 4}, "platform": {"cpu": MACHINE}, "build": {"seconds": 3}}
    description |= {"sources": {"checkpoint": {"weights": digest_json("weights")}, "calibration": digest_json("calib")}}
    return str(write_manifest(folder, description)["digest"])


def verdict_of(recipe: str, digest: str, word: str = "PROMOTE") -> dict[str, Any]:
    """A verdict with one metric, under the policy of `POLICY_YAML`."""
    metric = {"name": "bleu", "importance": "critical", "slice": "all", "n": 640, "baseline": 43.1, "candidate": 43.0}
    metric |= {"difference": -0.1, "lower": -0.5, "upper": 0.3, "confidence": 0.95, "margin": "2"}
    metric |= {"margin_kind": "relative", "margin_points": 0.862, "method": "bootstrap", "signature": "BLEU|x"}
    metric |= {"outcome": "pass", "higher_is_better": True, "needs_n": None, "detail": "loses at most 0.5"}
    entry = {"recipe": recipe, "engine": digest, "items": 640, "verdict": word}
    return {
        **{"schema": 1, "recipe": recipe, "engine_digest": digest, "verdict": word},
        **{"reasons": ["bleu on all loses at most 0.5 of 0.86 points"], "policy_digest": POLICY.digest(), "policy": {}},
        **{"validity": [], "metrics": [metric], "fidelity": {}, "ledger": [entry], "arms": {}},
        "attribution": {"metrics": {"bleu": {"noise": {"difference": 0.01, "lower": -0.08, "upper": 0.1}}}},
    }


def write_verdict(project: Path, recipe: str, digest: str, word: str = "PROMOTE") -> None:
    """Writes the verdict where `decide` does."""
    write_json(project / f"artifacts/verdicts/{recipe}.json", verdict_of(recipe, digest, word))


def commit(project: Path) -> None:
    """What the user does after a run."""
    shell(project, "git", "add", "-A")
    shell(project, "git", "commit", "-qm", "run")


def run_again(project: Path, weights: bytes, word: str = "PROMOTE") -> str:
    """A new fine-tune of int8_mixed: built, judged, committed; returns the engine's digest."""
    digest = write_engine(project / "engines/int8_mixed", "int8_mixed", weights)
    write_verdict(project, "int8_mixed", digest, word)
    reproduce(project)
    commit(project)
    return digest


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project after `dvc repro` and `git commit`: int8_mixed is promoted, int8_sq refused. Copy it."""
    project = tmp_path_factory.mktemp("registry") / "Shop.Translator"
    project.mkdir()
    (project / "dvc.yaml").write_text(DVC_YAML, encoding="utf-8")
    (project / "params.yaml").write_text("recipes: [int8_sq, int8_mixed]\n", encoding="utf-8")
    (project / "policy.yaml").write_text(POLICY_YAML, encoding="utf-8")
    (project / ".gitignore").write_text("/artifacts/\n/engines/\n__pycache__/\n", encoding="utf-8")
    for recipe, word in (("int8_sq", "REJECT"), ("int8_mixed", "PROMOTE")):
        digest = write_engine(project / "engines" / recipe, recipe, recipe.encode())
        write_verdict(project, recipe, digest, word)
    shell(project, "git", "init", "-q", "-b", "main")
    dvc(project, "init", "-q")
    dvc(project, "repro", "-q")
    commit(project)
    return project


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the template, in which the test runs."""
    folder = tmp_path / template.name
    shutil.copytree(template, folder, symlinks=True)
    monkeypatch.chdir(folder)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A User")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b.c")
    return folder


@pytest.fixture(scope="session")
def shared_template(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `Shop.Translator` (a clone), `shop.git` (bare, its origin) and `store` (its DVC remote)."""
    folder = tmp_path_factory.mktemp("shared")
    project = folder / template.name
    shutil.copytree(template, project, symlinks=True)
    dvc(project, "remote", "add", "-q", "--default", "store", "../store")  # relative, so that a copy has its own
    shell(folder, "git", "init", "-q", "--bare", "-b", "main", f"{template.name}.git")
    shell(project, "git", "remote", "add", "origin", f"../{template.name}.git")
    commit(project)
    shell(project, "git", "push", "-q", "--set-upstream", "origin", "main")
    return folder


@pytest.fixture
def shared(shared_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shared template; the test runs in its project."""
    folder = tmp_path / "shared"
    shutil.copytree(shared_template, folder, symlinks=True)
    monkeypatch.chdir(folder / "Shop.Translator")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A User")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b.c")
    return folder


def clone(folder: Path, name: str) -> Path:
    """Another machine's clone of the shared project."""
    shell(folder, "git", "clone", "-q", "Shop.Translator.git", name)
    return folder / name


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two key pairs: release.pem, release.pub, other.pem, other.pub."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("keys")
    for name in ("release", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        (folder / f"{name}.pem").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        (folder / f"{name}.pub").write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
    return folder


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an empty S3 server (moto) on a free port of loopback, which DVC reaches by the same variables."""
    import boto3
    from moto.server import ThreadedMotoServer

    (tmp_path / "aws").touch()
    for name, value in (
        *(("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test"), ("AWS_DEFAULT_REGION", "us-east-1")),
        *(("AWS_EC2_METADATA_DISABLED", "true"), ("AWS_CONFIG_FILE", str(tmp_path / "aws")), ("NO_PROXY", "127.0.0.1")),
    ):
        monkeypatch.setenv(name, value)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    server.stop()
