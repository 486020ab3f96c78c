"""No name of TensorRT-LLM is guessed: everything that the backend writes or says is in the table of documented ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.engines.tensorrt_llm import documented
from pipeline.engines.tensorrt_llm.build import llm_api_options
from pipeline.engines.tensorrt_llm.flags import PLUGINS, build_arguments, requested
from pipeline.engines.tensorrt_llm.runtime import answer_of, open_runtime
from pipeline.engines.tensorrt_llm.serving import serve_arguments, serving_config
from pipeline.engines.tensorrt_llm.usage import names_used, options
from pipeline.engines.tensorrt_llm.worker import probe
from pipeline.params import Engine, TensorRTLLM
from pipeline.serving.completion import CompletionRequest

WORKER = Path(probe.__file__).parent
ENGINE = Engine(backend="tensorrt_llm", tensorrt_llm=TensorRTLLM())


def pairs(arguments: list[str]) -> dict[str, str]:
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def accepted(takes: str, value: str) -> bool:
    """Whether a documented option takes this value."""
    if takes == "int":
        return value.isdecimal()
    return value in takes.split("|") if "|" in takes else True


@pytest.mark.parametrize("formats", PLUGINS)
@pytest.mark.parametrize("sm", [89, 90, 120])
def test_every_flag_of_every_build(formats: tuple[str | None, str | None], sm: int) -> None:
    asked = requested(ENGINE, *formats, sm)
    arguments = build_arguments(asked, checkpoint="c", output="o", timing_out="t", timing_in="i", workers=2)
    for flag, value in pairs(arguments).items():
        assert accepted(documented.BUILD_FLAGS[flag], value), (flag, value)
    assert {"--max_batch_size", "--max_seq_len", "--max_num_tokens", "--output_timing_cache"} <= options(arguments)
    assert not options(arguments) & {"--fast_build", "--strip_plan"}
    assert {algo for algo, _ in PLUGINS} - {None} == documented.QUANT_ALGOS
    assert {cache for _, cache in PLUGINS} - {None} == documented.KV_CACHE_QUANT_ALGOS


@pytest.mark.parametrize("formats", PLUGINS)
def test_every_field_of_the_llm_api(formats: tuple[str | None, str | None]) -> None:
    made = llm_api_options(ENGINE, requested(ENGINE, *formats, 90), "t", Path("i"))
    assert made["build_config"].keys() <= documented.BUILD_CONFIG_FIELDS
    assert made["plugin_config"].keys() <= documented.PLUGIN_FIELDS
    assert made["llm"].keys() <= documented.LLM_FIELDS
    assert {"max_batch_size", "max_seq_len", "output_timing_cache"} <= made["build_config"].keys()
    assert made["plugin_config"]["multiple_profiles"] is False


@pytest.mark.parametrize("profile", ["engine", "pytorch"])
def test_every_option_and_field_of_serving(profile: str) -> None:
    arguments = serve_arguments(Path("e"), profile, ENGINE, 8000)
    for option, value in pairs(arguments[1:]).items():
        assert accepted(documented.SERVE_OPTIONS[option], value), (option, value)
    assert ("--backend" in arguments) == (profile == "engine")  # without it PyTorch gets the engine: issue 8223
    assert {"--tokenizer", "--max_batch_size", "--max_num_tokens", "--max_seq_len"} <= options(arguments)
    config = serving_config(ENGINE, profile)
    assert config.keys() <= documented.LLM_FIELDS
    assert config["kv_cache_config"].keys() <= documented.KV_CACHE_FIELDS


def test_a_request() -> None:
    """Issues 1336, 2474, 2640: top_k 1 is greedy everywhere, temperature 0 was not."""
    body = CompletionRequest("x", (1, 2), 5, (7,), dialect="trtllm-serve").body("m")
    assert body.keys() <= documented.COMPLETION_FIELDS
    assert (body["prompt"], body["max_tokens"], body["top_k"], body["detokenize"]) == ([1, 2], 5, 1, False)
    assert not body.keys() & {"temperature", "top_p", "return_token_ids"}
    assert (body["stop_token_ids"], body["ignore_eos"], body["include_stop_str_in_output"]) == ([7], True, True)
    unending = CompletionRequest("x", (1, 2), 5, (7,), ignore_eos=True, dialect="trtllm-serve").body("m")
    assert unending["stop_token_ids"] == []


def test_what_is_checked_at_run_time_is_what_is_used() -> None:
    section = {"profile": "engine", "gpus": [{"sm": "90"}]}
    used = names_used(None, ENGINE, section)
    assert used.keys() == {"trtllm-serve", "CompletionRequest", "LLM", "KvCacheConfig", "trtllm-build"}
    tables = {
        "trtllm-serve": documented.SERVE_OPTIONS.keys(),
        "trtllm-build": documented.BUILD_FLAGS.keys(),
        "CompletionRequest": documented.COMPLETION_FIELDS,
        "LLM": documented.LLM_FIELDS,
        "KvCacheConfig": documented.KV_CACHE_FIELDS,
    }
    for thing, names in used.items():
        assert names
        assert names <= tables[thing], thing
    assert names_used(None, replace(ENGINE), section | {"profile": "pytorch"}).keys() == used.keys() - {"trtllm-build"}


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {"." * node.level + (node.module or "") + "." + alias.name for alias in node.names}
    return found


def test_the_worker_runs_there() -> None:
    """It is of Python 3.10, imports nothing of ours, and of TensorRT-LLM only what is documented."""
    seen: set[str] = set()
    for file in sorted(WORKER.glob("*.py")):
        tree = ast.parse(file.read_text(), feature_version=(3, 10))
        seen |= imports(tree)
        top = {name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for name in imports(node)}
        assert not {name for name in top if name.split(".")[0] in ("torch", "safetensors", "tensorrt_llm")}, file
    assert not {name for name in seen if name.startswith("pipeline")}
    of_library = {name for name in seen if name.startswith("tensorrt_llm")}
    looked_up = {*probe.CLASSES.values(), *probe.ENGINE_CLASSES.values(), *probe.PYTORCH_CLASSES.values()}
    assert of_library | looked_up <= documented.IMPORTS
    assert of_library


@pytest.mark.parametrize("python", [sys.executable, "python3.10", "python3.12"])
def test_the_worker_starts_without_anything_of_ours(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Isolated and without site-packages; on 3.10 and 3.12, which TensorRT-LLM has wheels for, where they are here."""
    if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"no {python} here")
    monkeypatch.chdir(tmp_path)
    folder = open_runtime(TensorRTLLM()).worker("look")[-2]
    done = subprocess.run([python, "-I", "-S", folder, "look"], capture_output=True, text=True, check=False)
    assert answer_of(done.stdout, done.returncode, done.stderr, "here")["python"].startswith("3.")
