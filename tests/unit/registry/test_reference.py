from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import UnfitError, UsageError
from pipeline.registry.fit import Machine, misfits, warnings
from pipeline.registry.reference import Build, Reference, fitting_build, label, parse_reference
from pipeline.registry.registration import artifact_of, ci_run, family_of, without_credentials
from pipeline.registry.tags import Version


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("shop-int8_mixed", Reference("shop-int8_mixed")),
        ("shop@v0.0.1", Reference("shop", "v0.0.1")),
        ("a/b#prod", Reference("a/b", None, "prod")),
    ],
)
def test_references(text: str, found: Reference) -> None:
    assert parse_reference(text) == found
    assert str(found) == text


@pytest.mark.parametrize("text", ["", "a@", "a#", "a@latest", "a@v1", "a@v1.2.3#x", "-a", "a b", "a@v01.0.0"])
def test_no_references(text: str) -> None:
    with pytest.raises(UsageError, match="not a reference"):
        parse_reference(text)


@given(st.text(max_size=20))
def test_a_reference_is_read_as_it_is_written_or_refused(text: str) -> None:
    try:
        assert str(parse_reference(text)) == text
    except UsageError as error:
        assert text in error.message


def manifest(sm: list[str] | None = None, machine: str = "x86_64", **packages: str) -> dict[str, Any]:
    backend = "tensorrt" if sm else "onnxruntime"
    validity = {"machine": machine, "sm": sm, "packages": packages}
    return {"backend": backend, "validity": validity, "platform": {"cpu": "x86_64 avx2 avx512 vnni"}}


def build(name: str, content: dict[str, Any]) -> Build:
    return Build(Version(name, "v0.0.1", "sha256:x", "commit", "tag", "object"), content)


def test_names_of_builds() -> None:
    for content, name in [
        (manifest(), "shop-int8-onnxruntime-x86_64"),
        (manifest(["90"]), "shop-int8-tensorrt-sm90"),
        (manifest(["89", "120"]), "shop-int8-tensorrt-sm89-sm120"),
    ]:
        assert artifact_of("shop-int8", content) == name
        assert family_of(name, content) == "shop-int8"


def test_the_words_of_a_misfit() -> None:
    trt = manifest(["89"], tensorrt="10.13.3")
    here = {"tensorrt": "10.13.3"}
    assert misfits(trt, Machine("x86_64", "89", packages=here)) == []
    assert misfits(trt, Machine("x86_64", "90", packages=here)) == ["built for SM 89, this GPU is SM 90"]
    assert misfits(trt, Machine("x86_64", None, "no NVIDIA driver", here)) == ["needs a GPU of SM 89: no NVIDIA driver"]
    other = misfits(trt, Machine("aarch64", "89", packages={"tensorrt": "9.2"}))
    assert other == ["built for x86_64, this machine is aarch64", "needs tensorrt 10.13.3, here is 9.2"]
    absent = misfits(manifest(["89"], no_such_package="1"), Machine("x86_64", "89"))
    assert absent == ["needs no_such_package 1, which is not installed here"]
    assert misfits(manifest(["89", "120"]), Machine("x86_64", "120")) == []


def test_versions_are_those_installed() -> None:
    import importlib.metadata

    machine = Machine("x86_64", None)
    assert machine.version("dvc") == importlib.metadata.version("dvc")
    assert machine.version("no_such_package") is None


def test_a_cpu_with_other_kernels_is_a_warning() -> None:
    assert warnings(manifest(), Machine("x86_64 avx2 avx512 vnni amx", None)) == []
    found = warnings(manifest(), Machine("x86_64 avx2", None))
    assert len(found) == 1 and "avx512, vnni" in found[0]
    assert warnings(manifest(["90"]), Machine("x86_64", "90")) == []


def test_the_best_build() -> None:
    cpu, one, two = build("cpu", manifest()), build("sm90", manifest(["90"])), build("also", manifest(["89", "90"]))
    name = Reference("shop")
    gpu, none = Machine("x86_64", "90"), Machine("x86_64", None, "no GPU")
    assert fitting_build([cpu, one], name, gpu) is one
    assert fitting_build([cpu, one], name, none) is cpu
    with pytest.raises(UsageError, match="several builds run here: sm90, also"):
        fitting_build([cpu, one, two], name, gpu)
    with pytest.raises(UnfitError, match=r"sm90@v0\.0\.1: needs a GPU of SM 90: no GPU") as caught:
        fitting_build([one], name, none)
    assert "--sm" in caught.value.next_step


def test_labels() -> None:
    assert label(manifest()) == "x86_64"
    assert label(manifest(["89", "120"], tensorrt="10.1")) == "SM 89/120, tensorrt 10.1"


def test_ci_runs() -> None:
    github = {"GITHUB_RUN_ID": "7", "GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "o/r"}
    assert ci_run(github) == "https://github.com/o/r/actions/runs/7"
    assert ci_run({"CI_JOB_URL": "https://gitlab/job/1"}) == "https://gitlab/job/1"
    assert ci_run({"BUILD_URL": "https://jenkins/1"}) == "https://jenkins/1"
    assert ci_run({}) is None


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("https://user:token@example.org/o/r.git", "https://example.org/o/r.git"),
        ("https://example.org:8443/r.git", "https://example.org:8443/r.git"),
        ("git@example.org:o/r.git", "git@example.org:o/r.git"),
        ("../r.git", "../r.git"),
    ],
)
def test_no_secret_enters_the_provenance(url: str, clean: str) -> None:
    assert without_credentials(url) == clean
