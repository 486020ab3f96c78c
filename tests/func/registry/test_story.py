"""The story of docs/registry.md with its own commands: one repository, a bare remote, an S3 store, the real gate."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.files import read_json
from tests.func.registry.conftest import DVC_YAML, MACHINE, ROOT, dvc, shell, write_engine
from tests.unit.report.synthetic import make_items, spoil, write_run

FAMILY = "shop-int8_mixed"
ARTIFACT = f"{FAMILY}-onnxruntime-{MACHINE}"
ITEMS = 400
# Engines are outputs of their own, as in a whole project. Here `fine_tune` has built them before `dvc repro`.
BUILD = """\
  build:
    cmd: test -f engines/int8_mixed/manifest.json
    deps: [weights]
    outs:
      - engines/int8_mixed:
          persist: true
"""


def blocks() -> list[tuple[str, str]]:
    """(machine, commands) of the page, in its order; the artifact's name is that of this machine."""
    text = (ROOT / "docs/registry.md").read_text(encoding="utf-8")
    found = re.findall(r"^```sh (build|serving)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(machine, commands.replace("-x86_64", f"-{MACHINE}")) for machine, commands in found]


def fine_tune(project: Path, weights: str, *, worse: bool = False) -> str:
    """What `dvc repro` computes up to the verdicts, judged by the real gate; returns the engine's digest."""
    shutil.rmtree(project / "artifacts", ignore_errors=True)
    digest = write_engine(project / "engines/int8_mixed", "int8_mixed", weights.encode())
    for name in ("int8_sq", "runtime"):
        write_engine(project / "engines" / name, name, f"{weights} {name}".encode())
    answers = {}
    if worse:
        order = random.Random(1)
        answers = {
            "int8_mixed": [spoil(spoil(spoil(item.reference, order), order), order) for item in make_items(ITEMS)]
        }
    write_run(project, count=ITEMS, **answers)
    (project / "weights").write_text(weights, encoding="utf-8")
    (project / "ledger").mkdir(exist_ok=True)
    with (project / "ledger/attempts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"engine": digest}) + "\n")
    return digest


class Machines:
    """The build machine, and a serving machine that clones when it is first needed."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.folder, self.keys, self.blocks = folder, keys, blocks()

    def next(self, machine: str) -> str:
        """Runs the page's next block, which must be one for ``machine``; returns what it printed."""
        named, commands = self.blocks.pop(0)
        assert named == machine
        place = self.folder / machine
        if not place.exists():
            shell(self.folder, "git", "clone", "-q", str(self.folder / "shop.git"), machine)
        for name in ("release.pem", "release.pub") if machine == "build" else ("release.pub",):
            shutil.copy(self.keys / name, place / name)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {
            **{"PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            **{f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        }
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", commands],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def pulled(self, version: str) -> dict[str, Any]:
        """The manifest in the serving machine's folder of a version."""
        found: dict[str, Any] = read_json(self.folder / f"serving/engines/pulled/{ARTIFACT}@{version}/manifest.json")
        return found


@pytest.fixture
def machines(tmp_path: Path, s3: Any, keys: Path) -> Machines:
    """A project with a bare git remote and a bucket, before its first fine-tune."""
    project = tmp_path / "build"
    project.mkdir()
    (project / "dvc.yaml").write_text(DVC_YAML + BUILD, encoding="utf-8")
    (project / "params.yaml").write_text("recipes: [int8_sq, int8_mixed]\n", encoding="utf-8")
    (project / "policy.yaml").write_text("require: any\nrequire_signature: false\n", encoding="utf-8")
    ignored = "/artifacts/\n/engines/\n/calib_data/\n__pycache__/\n/weights\n*.pem\n*.pub\n"
    (project / ".gitignore").write_text(ignored, encoding="utf-8")
    s3.create_bucket(Bucket="engines")
    shell(tmp_path, "git", "init", "-q", "--bare", "-b", "main", "shop.git")
    shell(project, "git", "init", "-q", "-b", "main")
    shell(project, "git", "remote", "add", "origin", str(tmp_path / "shop.git"))
    dvc(project, "init", "-q")
    dvc(project, "remote", "add", "-q", "--default", "store", "s3://engines/shop")
    dvc(project, "remote", "modify", "store", "endpointurl", s3.meta.endpoint_url)
    shell(project, "git", "add", "-A")
    shell(project, "git", "commit", "-qm", "A project")
    shell(project, "git", "push", "-q", "origin", "main")
    return Machines(tmp_path, keys)


def test_story(machines: Machines) -> None:
    project = machines.folder / "build"
    first = fine_tune(project, "first")
    out = machines.next("build")
    assert "int8_mixed: PROMOTE" in out and "int8_sq: REJECT" in out
    assert f"int8_mixed: registered as v0.0.1 ({ARTIFACT}@v0.0.1, {first[:19]}, signed), in stage production" in out
    out = machines.next("serving")
    assert "pulled, every byte verified; signature verified" in out
    assert f"{ARTIFACT}@v0.0.1: 3 files in DVC remote store" in out
    assert machines.pulled("v0.0.1")["digest"] == first
    assert machines.pulled("v0.0.1")["gate"]["metrics"][0]["lower"] is not None

    fine_tune(project, "second", worse=True)
    out = machines.next("build")
    assert "int8_mixed: REJECT" in out and "int8_mixed: already registered as v0.0.1" in out
    assert shell(machines.folder / "shop.git", "git", "tag").split() == [
        *(f"{ARTIFACT}#production#1", f"{ARTIFACT}@v0.0.1")
    ]

    third = fine_tune(project, "third")
    out = machines.next("build")
    assert f"int8_mixed: registered as v0.0.2 ({ARTIFACT}@v0.0.2, {third[:19]}, signed), in stage production" in out
    assert "model.onnx.data" in out and "metrics (difference to the FP16 baseline, points)" in out
    assert "pulled" in machines.next("serving")
    assert machines.pulled("v0.0.2")["digest"] == third

    out = machines.next("serving")
    assert f"{ARTIFACT}#production: moved from v0.0.2 to v0.0.1" in out
    assert f"{ARTIFACT}@v0.0.1: is here already, every byte verified; signature verified" in out
    assert "production: v0.0.2 -> v0.0.1 (rollback)" in out

    second = Path("files/md5") / hashlib.md5(b"second").hexdigest()[:2] / hashlib.md5(b"second").hexdigest()[2:]
    assert (project / ".dvc/cache" / second).exists()
    out = machines.next("build")
    assert "nothing was deleted: --delete does it" in out and "freed" in out
    assert not (project / ".dvc/cache" / second).exists()
    assert machines.blocks == []
