from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.params import Baseline
from pipeline.platform import cpu_isa, describe_platform, find_backends, find_gpu

SMI = """\
#!/bin/sh
case "$*" in
  *--query-gpu*) echo "NVIDIA H200, 9.0, 580.159.04"; echo "NVIDIA H200, 9.0, 580.159.04";;
  *) echo "| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: 13.0 |";;
esac
"""


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    (folder / name).chmod(0o755)
    return folder / name


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH that holds only what a test puts there."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "bin"


def test_a_gpu(bare: Path) -> None:
    program(bare, "nvidia-smi", SMI)
    found = describe_platform(Baseline())["device"]
    assert (found["gpu"], found["sm"], found["driver"], found["cuda"]) == ("NVIDIA H200", "90", "580.159.04", "13.0")


def test_no_driver() -> None:
    gpu, why = find_gpu()
    assert gpu is None
    assert "nvidia-smi" in why


def test_a_broken_driver_says_so(bare: Path) -> None:
    program(bare, "nvidia-smi", "#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
    gpu, why = find_gpu()
    assert gpu is None
    assert "version mismatch" in why


def test_hidden_gpus(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare, "nvidia-smi", SMI)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpu()[0] is None


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("flags\t\t: sse2 avx2", "avx2"),
        ("flags : avx2 avx512f avx512_vnni amx_int8", "avx2 avx512 vnni amx"),
        ("flags : avx2 avx_vnni", "avx2 vnni"),
        ("Features : asimd asimddp i8mm", "neon dotprod i8mm"),
        ("", ""),
    ],
)
def test_cpu(tmp_path: Path, flags: str, isa: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name : x\n{flags}\n", encoding="utf-8")
    import platform

    assert cpu_isa(tmp_path / "cpuinfo") == f"{platform.machine()} {isa}".strip()
    assert cpu_isa(tmp_path / "absent") == platform.machine()


@pytest.mark.parametrize(
    ("installed", "library", "expected"),
    [
        ({"tensorrt": "10.9.0"}, "auto", "10.9.0"),
        ({"tensorrt": "10.9.0", "tensorrt-rtx": "1.7.1"}, "auto", "10.9.0"),
        ({"tensorrt": "10.9.0", "tensorrt-rtx": "1.7.1"}, "tensorrt_rtx", "tensorrt_rtx 1.7.1"),
        ({"tensorrt-rtx-cu13-bindings": "1.7.1"}, "auto", "tensorrt_rtx 1.7.1"),
        ({"tensorrt-rtx-cu13-bindings": "1.7.1"}, "tensorrt", None),
        ({}, "auto", None),
    ],
)
def test_both_tensorrt_libraries(
    installed: dict[str, str], library: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = find_backends(Baseline(), "", library)["tensorrt"]
    assert (found.version, found.available) == (expected, expected is not None)
    assert "tensorrt_rtx" not in find_backends(Baseline(), "", library)


def test_vllm_of_another_environment(tmp_path: Path) -> None:
    info = tmp_path / "venv/lib/python3.12/site-packages/vllm-0.99.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0\n", encoding="utf-8")
    vllm = program(tmp_path / "venv/bin", "vllm", "#!/bin/sh\n")
    assert find_backends(Baseline(vllm=str(vllm)), "")["vllm"].version == "0.99.0"


def test_vllm_that_is_not_there_or_elsewhere() -> None:
    missing = find_backends(Baseline(vllm="nowhere/vllm"), "")["vllm"]
    assert not missing.available
    assert "nowhere/vllm" in missing.why_not
    assert find_backends(Baseline(url="http://127.0.0.1:1"), "")["vllm"].available


def test_equal_in_every_run() -> None:
    assert describe_platform(Baseline()) == describe_platform(Baseline())


def test_it_imports_nothing_heavy_and_is_quick() -> None:
    code = (
        "import sys; from pipeline.platform import describe_platform; from pipeline.params import Baseline;"
        "describe_platform(Baseline()); print([m for m in ('torch', 'numpy', 'onnxruntime') if m in sys.modules])"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert time.monotonic() - start < 5  # 0.2 s when nothing else runs
