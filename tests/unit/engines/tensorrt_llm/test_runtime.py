"""Command lines of an environment, and answers of the worker in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.tensorrt_llm.runtime import PACKAGE, answer_of, explain_code, open_runtime
from pipeline.engines.tensorrt_llm.worker import MARK
from pipeline.errors import BuildError
from pipeline.params import TensorRTLLM


def test_a_container_is_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "docker run --rm --user {uid}:{gid} -v {project}:{project} 'image with space'"
    runtime = open_runtime(TensorRTLLM(container=text, env={"FORCE_DETERMINISTIC": "1"}))
    command = runtime.command("trtllm-serve", "engine")
    user = f"{os.getuid()}:{os.getgid()}"
    assert command[:8] == ("docker", "run", "--rm", "--user", user, "-v", f"{tmp_path}:{tmp_path}", "image with space")
    assert command[8] == "env"
    assert {"FORCE_DETERMINISTIC=1", "HF_HUB_OFFLINE=1"} <= set(command)
    assert command[-2:] == ("trtllm-serve", "engine")
    worker = runtime.worker("look")
    assert (worker[-3], worker[-1]) == ("python3", "look")
    folder = Path(worker[-2])
    assert folder.is_relative_to(tmp_path), "inside what the container mounts"
    assert (folder / PACKAGE / "convert.py").is_file()


def test_answers_of_the_worker() -> None:
    noisy = '[TensorRT-LLM] TensorRT-LLM version: 1.2.1\nenginegate-worker: {"a": 1}\nbye\n'
    assert answer_of(noisy, 0, noisy, "there") == {"a": 1}
    refused = 'enginegate-worker: {"message": "no", "next_step": "yes"}\n'
    with pytest.raises(BuildError, match="no") as error:
        answer_of(refused, 3, refused, "there")
    assert error.value.next_step == "yes"
    with pytest.raises(BuildError, match="exit code 1:\n  . ModuleNotFoundError: torch"):
        answer_of("", 1, "ModuleNotFoundError: torch\n", "there")
    with pytest.raises(BuildError, match="exit code 0"):
        answer_of("nothing", 0, "nothing", "there")
    assert "memory" in explain_code(137)
    assert "memory" in explain_code(-9)
    assert explain_code(1) == "exit code 1"


NOISE = st.lists(st.text(st.characters(blacklist_categories=["Cs"])).filter(lambda text: MARK not in text))
ANSWER = st.dictionaries(st.text(), st.integers() | st.none() | st.lists(st.text()))


@given(before=NOISE, answer=ANSWER, after=NOISE)
def test_an_answer_is_found_between_anything(before: list[str], answer: dict[str, object], after: list[str]) -> None:
    output = "\n".join([*before, f"{MARK} {json.dumps(answer)}", *after])
    assert answer_of(output, 0, output, "there") == answer
