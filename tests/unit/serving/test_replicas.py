"""Where servers go: GPUs of their own, or behind the launcher; and in which order they are asked."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from pipeline.errors import ServerError
from pipeline.params import Params
from pipeline.serving.client import in_turn
from pipeline.serving.process import ServerCommand
from pipeline.serving.replicas import placed, visible_gpus


def commands(count: int, gpus: int = 1) -> list[ServerCommand]:
    return [ServerCommand("toy", ("serve", str(place)), 8000 + place, {"A": "b c"}, gpus) for place in range(count)]


def devices(found: list[ServerCommand]) -> list[str | None]:
    return [command.env.get("CUDA_VISIBLE_DEVICES") for command in found]


@pytest.mark.parametrize(
    ("visible", "count", "gpus", "expected"),
    [
        ("0,1", 2, 1, ["0", "1"]),
        ("4, 5,6,7", 2, 2, ["4,5", "6,7"]),
        ("GPU-abc,GPU-def", 2, 1, ["GPU-abc", "GPU-def"]),
        ("0,1", 1, 2, ["0,1"]),  # one server, sharded
        ("0,1", 1, 1, [None]),  # one server alone keeps what it is given
    ],
)
def test_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, visible: str, count: int, gpus: int, expected: list[str | None]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices(placed(commands(count, gpus), Params(), gpu=True)) == expected


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ServerError, match="2 servers on 2 GPUs each need 4, here are 3") as raised:
        placed(commands(2, 2), Params(), gpu=True)
    assert "serving.replicas" in raised.value.next_step


def test_without_gpus_replicas_share_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices(placed(commands(3), Params(), gpu=False)) == [None, None, None]


def test_gpus_are_counted_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nprint('0\\n1\\n2')\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert visible_gpus() == []


def test_behind_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher gives the GPUs; what the server needs of our environment goes with the command."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # this machine's GPUs are not those of the launcher
    found = placed(commands(2, 2), Params(launcher="srun --gpus-per-task=2 --comment='two words'"), gpu=True)
    assert [command.argv for command in found] == [
        ("srun", "--gpus-per-task=2", "--comment=two words", "env", "A=b c", "serve", "0"),
        ("srun", "--gpus-per-task=2", "--comment=two words", "env", "A=b c", "serve", "1"),
    ]
    assert devices(found) == [None, None]


def test_requests_go_to_the_servers_in_turn() -> None:
    assert list(itertools.islice(in_turn(("a", "b")), 5)) == ["a", "b", "a", "b", "a"]
    assert list(itertools.islice(in_turn("http://one"), 2)) == ["http://one", "http://one"]
