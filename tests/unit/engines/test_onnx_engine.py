"""From a tiny checkpoint to engines: export, Q/DQ, CPU lowering, decoding; against torch and ModelOpt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.engines import BuildInputs
from pipeline.engines.check import check_engine, forced_logits
from pipeline.engines.lowering.export import export_plain
from pipeline.engines.lowering.qdq import check_untouched, insert_qdq
from pipeline.engines.lowering.quantized import QuantizedCheckpoint
from pipeline.engines.onnxruntime import compile_engine
from pipeline.engines.onnxruntime import executor as ort
from pipeline.engines.onnxruntime.executor import OrtExecutor
from pipeline.engines.onnxruntime.kernels import lower_for_cpu
from pipeline.errors import BuildError, ServerError
from pipeline.params import Engine
from pipeline.quantize.batches import Samples
from pipeline.quantize.calibrate import quantize_model
from pipeline.quantize.probe import Probe, probe_model
from pipeline.quantize.recipes import load_recipe

SAMPLES = [[*range(5, 12 + place % 3), 20 + place] for place in range(12)]


@dataclass(frozen=True)
class Built:
    """Folders of the plain graph and of each recipe's export and engine, with the probes."""

    folder: Path
    probes: dict[str, Probe]


@pytest.fixture(scope="module")
def built(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("engines")

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            tiny_checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    model = load()
    probes = {"none": probe_model(model, SAMPLES)}
    for name in ("plain", "engine-none", "engine-int8_sq", "engine-int8_mixed"):
        (folder / name).mkdir()
    export_plain(model, folder / "plain")
    compile_engine(_inputs(folder), folder / "engine-none")
    for name in ("int8_sq", "int8_mixed"):
        model = load()
        quantize_model(model, load_recipe(name), Samples(SAMPLES), 64)
        probes[name] = probe_model(model, SAMPLES)
        export_hf_checkpoint(model, export_dir=str(folder / name / "checkpoint"))
        compile_engine(_inputs(folder, name), folder / f"engine-{name}")
    return Built(folder, probes)


def _inputs(folder: Path, recipe: str | None = None) -> BuildInputs:
    quantized, chosen = (folder / recipe, load_recipe(recipe)) if recipe else (None, None)
    return BuildInputs(folder / "checkpoint", folder / "plain", quantized, chosen, Engine(), {})


def _executor(built: Built, name: str) -> OrtExecutor:
    return OrtExecutor(built.folder / f"engine-{name}", max_batch=8, max_tokens=64, threads=1)


def test_the_runtime_engine_gives_torchs_logits(built: Built) -> None:
    """Prompts of several lengths in one left-padded batch, then cached decode steps."""
    logits = forced_logits(_executor(built, "none"), built.probes["none"].tokens)
    np.testing.assert_allclose(logits, built.probes["none"].logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_scores_are_torchs_log_softmax(
    built: Built, tiny_model: Any, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths in one batch, read in pieces of 1, of 3 and of all tokens."""
    import torch

    executor = _executor(built, "none")
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 4, 31], [20], [9, 40, 80, 2, 1]]
    monkeypatch.setattr(ort, "SCORE_VALUES", rows_at_once * len(prompts) * executor.vocab_size)
    for prompt, scores in zip(prompts, executor.score(prompts), strict=True):
        with torch.no_grad():
            expected = torch.log_softmax(tiny_model(torch.tensor([prompt])).logits[0].double(), dim=-1).numpy()
        assert np.isnan(scores.given[0])
        given = [expected[place, token] for place, token in enumerate(prompt[1:])]
        np.testing.assert_allclose(scores.given[1:], given, rtol=0, atol=1e-4)
        assert scores.best.tolist() == expected.argmax(axis=-1).tolist()
        np.testing.assert_allclose(scores.best_log_prob, expected.max(axis=-1), rtol=0, atol=1e-4)


def test_scores_of_an_overflowing_engine_are_an_error(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = _executor(built, "none")
    logits = np.zeros((1, 3, executor.vocab_size), np.float32)
    logits[0, 1, 7] = np.nan
    monkeypatch.setattr(executor, "_run", lambda *_words, **_options: logits)
    with pytest.raises(ServerError, match="not finite"):
        executor.score([[5, 6, 7]])


@pytest.mark.parametrize("recipe", ["int8_sq", "int8_mixed"])
def test_the_int8_engine_gives_the_fake_quantised_models_logits(built: Built, recipe: str) -> None:
    """The acceptance test of the lowering: same calibration, same tokens, ModelOpt against integer kernels."""
    found = check_engine(_executor(built, recipe), built.probes[recipe], "int8")
    assert found.mean_kl < 0.002
    assert built.probes[recipe].noise < 0.01, "a noisy reference would make the check toothless"
    # The check can fail: it tells this recipe's model from the original one.
    from pipeline.quantize.probe import agreement

    assert agreement(built.probes["none"].logits, built.probes[recipe].logits).mean_kl > found.mean_kl


def test_a_wrong_engine_is_refused(built: Built) -> None:
    probe = built.probes["none"]
    shuffled = Probe(probe.tokens, probe.logits[:, :, ::-1].copy(), probe.noise)
    with pytest.raises(BuildError, match="the engine is not the model it was built from"):
        check_engine(_executor(built, "none"), shuffled, "none")
    nan = Probe(probe.tokens, np.full_like(probe.logits, np.nan), probe.noise)
    with pytest.raises(BuildError, match="mean KL nan"):
        check_engine(_executor(built, "none"), nan, "none")


def test_a_probe_is_read_in_the_engines_batches(built: Built) -> None:
    probe, executor = built.probes["none"], _executor(built, "none")
    together = forced_logits(executor, probe.tokens)
    executor.max_batch = 3
    np.testing.assert_allclose(forced_logits(executor, probe.tokens), together, rtol=1e-3, atol=1e-4)
    executor.max_tokens = len(probe.tokens[0])  # only the shortest fit
    assert check_engine(executor, probe, "none").mean_kl < 1e-6
    executor.max_tokens = 7
    with pytest.raises(BuildError, match="every probed sequence is longer than the engine's 7 tokens"):
        check_engine(executor, probe, "none")


@pytest.mark.parametrize(("recipe", "count"), [("int8_sq", 14), ("int8_mixed", 12)])
def test_every_promised_matmul_runs_in_int8(built: Built, recipe: str, count: int, tmp_path: Path) -> None:
    """Counted by ONNX Runtime itself: its profile of one run names the kernels that ran."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = ort.InferenceSession(str(built.folder / f"engine-{recipe}" / "model.onnx"), options)
    feeds = {
        "input_ids": np.array([[5, 6]]),
        "position_ids": np.array([[0, 1]]),
        "attention_mask": np.ones((1, 2), np.int64),
        "logit_positions": np.array([1]),
    }
    for value in session.get_inputs():
        if value.name not in feeds:
            feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    kernels = [event["args"]["op_name"] for event in events if event.get("name", "").endswith("_kernel_time")]
    assert kernels.count("MatMulIntegerToFloat") == count


def test_the_lowered_graph_computes_what_the_qdq_graph_computes(built: Built, tmp_path: Path) -> None:
    import onnx

    from pipeline.engines.lowering.weights import save_graph

    model = onnx.load(str(built.folder / "plain" / "model.onnx"))
    with QuantizedCheckpoint(built.folder / "int8_sq" / "checkpoint") as checkpoint:
        insert_qdq(model, checkpoint)
    save_graph(model, tmp_path / "model.onnx", tmp_path)
    qdq = OrtExecutor(tmp_path, max_batch=8, max_tokens=64, threads=1)
    probe = built.probes["int8_sq"]
    np.testing.assert_allclose(
        forced_logits(qdq, probe.tokens), forced_logits(_executor(built, "int8_sq"), probe.tokens), rtol=0, atol=2e-2
    )


def test_a_plain_graph_has_nothing_to_lower(built: Built) -> None:
    import onnx

    assert lower_for_cpu(onnx.load(str(built.folder / "plain" / "model.onnx"))) == 0


def test_scales_for_layers_that_the_graph_lacks_are_refused(built: Built) -> None:
    import onnx

    plain = built.folder / "plain"
    model = onnx.load(str(plain / "model.onnx"))
    with QuantizedCheckpoint(built.folder / "int8_sq" / "checkpoint") as checkpoint:
        check_untouched(model, plain, checkpoint)
        checkpoint.layers["model.layers.9.x"] = checkpoint.layers["model.layers.0.self_attn.q_proj"]
        with pytest.raises(BuildError, match="first model.layers.9.x"):
            insert_qdq(model, checkpoint)
        norm = next(tensor for tensor in model.graph.initializer if tensor.name == "model.norm.weight")
        norm.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(norm) * 2, norm.name))
        with pytest.raises(BuildError, match="model.norm.weight: the quantised export changed this tensor"):
            check_untouched(model, plain, checkpoint)


def test_a_tied_embedding_is_stored_once(built: Built) -> None:
    import onnx

    model = onnx.load(str(built.folder / "plain" / "model.onnx"), load_external_data=False)
    assert [list(t.dims) for t in model.graph.initializer].count([85, 128]) == 1
    assert [128, 85] not in [list(t.dims) for t in model.graph.initializer]


@pytest.mark.parametrize("lengths", [(3, 6), (6, 3), (4, 4)])
def test_joined_rows_go_on_as_they_would_alone(built: Built, lengths: tuple[int, int]) -> None:
    executor = _executor(built, "none")
    prompts = [list(range(5, 5 + length)) for length in lengths]
    alone = [executor.prefill([prompt])[0] for prompt in prompts]
    expected = [executor.decode(state, np.array([token])) for state, token in zip(alone, (30, 31), strict=True)]
    states = [executor.prefill([prompt])[0] for prompt in prompts]
    executor.join(states[0], states[1])
    together = executor.decode(states[0], np.array([30, 31]))
    np.testing.assert_allclose(together, np.concatenate(expected), rtol=1e-3, atol=1e-4)


def test_dropping_rows_changes_no_other_row(built: Built) -> None:
    executor = _executor(built, "none")
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15]]
    alone_state, alone = executor.prefill([prompts[2]])
    state, logits = executor.prefill(prompts)
    np.testing.assert_allclose(logits[2], alone[0], rtol=1e-3, atol=1e-4)
    executor.keep(state, np.array([0, 2]))
    assert state.mask.shape == (2, 3)  # the padding that only the dropped row needed is gone
    token = np.array([20, 21])
    both = executor.decode(state, token)
    single = executor.decode(alone_state, token[1:])
    np.testing.assert_allclose(both[1], single[0], rtol=1e-3, atol=1e-4)
