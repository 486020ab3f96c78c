"""The decoder graph with fixed buffers, run by ONNX Runtime, against torch: all architectures, uneven rows, the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.engines.tensorrt import graph
from pipeline.engines.tensorrt.graph import DecoderShape, export_decoder
from pipeline.errors import BuildError
from tests.families import FAMILIES, VOCABULARY, make_model, torch_logits

CAPACITY = 24


class Runner:
    """A batch over the graph: buffers of ``CAPACITY`` places, full of numbers that no result may depend on."""

    def __init__(self, folder: Path, shape: DecoderShape, rows: int, kind: Any = np.float32) -> None:
        import onnxruntime as ort

        self._session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
        self._shape = shape
        random = np.random.default_rng(1)
        size = (rows, shape.kv_heads, CAPACITY, shape.head_size)
        self.buffers = {name: random.normal(size=size).astype(kind) * 50 for name in shape.past}
        self.lengths = np.zeros(rows, np.int32)

    def read(self, pieces: Sequence[Sequence[int]]) -> np.ndarray:
        """Reads one piece a row, padded on the right; returns the logits ``[rows, vocabulary]`` after each."""
        width = max(map(len, pieces))
        ids = np.zeros((len(pieces), width), np.int32)
        for row, piece in enumerate(pieces):
            ids[row, : len(piece)] = piece
        places = [row * width + len(piece) - 1 for row, piece in enumerate(pieces)]
        feeds = {"input_ids": ids, "past_lengths": self.lengths, "logit_rows": np.array(places, np.int32)}
        logits, *new = self._session.run(self._shape.outputs, feeds | self.buffers)
        for name, part in zip(self._shape.past, new, strict=True):
            for row, piece in enumerate(pieces):
                start = self.lengths[row]
                self.buffers[name][row, :, start : start + len(piece)] = part[row, :, : len(piece)]
        self.lengths = self.lengths + np.array([len(piece) for piece in pieces], np.int32)
        return np.asarray(logits, np.float32)


def _sequences(seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, CAPACITY).tolist() for _ in range(3)]


def _expected(model: Any, tokens: Sequence[int]) -> np.ndarray:
    return torch_logits(model, tokens, 1)[0]


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, as a share of the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_and_steps_to_the_last_place_give_torchs_logits(family: str, tmp_path: Path) -> None:
    """Prompts of 1, 6 and 9 tokens in one batch, a second piece of 3, 1 and 2, then steps until a buffer is full."""
    model = make_model(family)
    sequences = _sequences(3)
    before = torch_logits(model, sequences[0], 4)
    shape = DecoderShape(**export_decoder(model, tmp_path, capacity=CAPACITY))
    np.testing.assert_array_equal(torch_logits(model, sequences[0], 4), before)  # the export left the model as it was
    runner = Runner(tmp_path, shape, rows=3)
    taken = [0, 0, 0]
    for counts in ((1, 6, 9), (3, 1, 2), *[(1, 1, 1)] * (CAPACITY - 11)):
        logits = runner.read(
            [row[start : start + count] for row, start, count in zip(sequences, taken, counts, strict=True)]
        )
        taken = [start + count for start, count in zip(taken, counts, strict=True)]
        for row, end, found in zip(sequences, taken, logits, strict=True):
            assert apart(found, _expected(model, row[:end])) < 2e-5
    assert max(taken) == CAPACITY


def test_capacity_is_free_up_to_the_largest(tmp_path: Path) -> None:
    """A prompt is read with one place in each buffer, as the executor does it."""
    model = make_model("llama")
    shape = DecoderShape(**export_decoder(model, tmp_path, capacity=CAPACITY))
    runner, prompt = Runner(tmp_path, shape, rows=1), _sequences(5)[0]
    runner.buffers = {name: buffer[:, :, :1] for name, buffer in runner.buffers.items()}
    feeds = {
        "input_ids": np.array([prompt], np.int32),
        "past_lengths": np.zeros(1, np.int32),
        "logit_rows": np.arange(CAPACITY, dtype=np.int32),
    }
    (logits,) = runner._session.run(["logits"], feeds | runner.buffers)
    assert apart(logits, torch_logits(model, prompt, CAPACITY)) < 2e-5


def test_float16_graph(tmp_path: Path) -> None:
    import torch

    model = make_model("llama")
    exact = _expected(model, _sequences(3)[0])
    shape = DecoderShape(**export_decoder(model.to(torch.float16), tmp_path, capacity=CAPACITY))
    found = Runner(tmp_path, shape, rows=1, kind=np.float16).read([_sequences(3)[0]])
    assert apart(found[0], exact) < 0.02


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("opset", [17, 18])
def test_the_graph_is_one_that_tensorrt_8_6_parses(family: str, opset: int, tmp_path: Path) -> None:
    """What its parser insists on: axes, steps and sizes of parts are constants (a Slice's axes were met on an H200)."""
    import onnx

    export_decoder(make_model(family), tmp_path, capacity=CAPACITY, opset=opset)
    model = onnx.load(str(tmp_path / "model.onnx"), load_external_data=False)
    onnx.checker.check_model(str(tmp_path / "model.onnx"))
    assert model.opset_import[0].version == opset
    constant = {tensor.name for tensor in model.graph.initializer}
    constant |= {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
    fixed = {"Slice": (3, 4), "Split": (1,), "Unsqueeze": (1,), "Squeeze": (1,), "ReduceSum": (1,), "ReduceMean": (1,)}
    for node in model.graph.node:
        for place in fixed.get(node.op_type, ()):
            if len(node.input) > place:
                assert node.input[place] in constant, f"{node.name}: input {place} is computed"
        assert node.op_type not in ("Range", "Mod", "If", "Loop", "NonZero", "Trilu", "ScatterND")
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    assert types["input_ids"] == types["past_lengths"] == types["logit_rows"] == onnx.TensorProto.INT32


def test_linear_layers_are_named_after_their_modules(tmp_path: Path) -> None:
    import onnx

    model = make_model("llama")
    export_decoder(model, tmp_path, capacity=CAPACITY)
    names = {node.name for node in onnx.load(str(tmp_path / "model.onnx"), load_external_data=False).graph.node}
    wanted = {name for name, module in model.named_modules() if type(module).__name__ == "Linear"}
    assert len(wanted) == 15
    assert wanted <= names


def test_attention_that_cannot_be_exchanged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="BloomForCausalLM: its attention cannot be exchanged"):
        export_decoder(make_model("bloom"), tmp_path, capacity=CAPACITY)


def test_more_positions_than_the_model_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="the model has 128 positions, engine.max_tokens is 129"):
        export_decoder(make_model("llama"), tmp_path, capacity=129)


def test_rotations_that_depend_on_the_length_are_refused(tmp_path: Path) -> None:
    from transformers import Phi3Config, Phi3ForCausalLM

    factors = [1.0] * 8
    config = Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=128,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 16,
        },
        pad_token_id=0,
    )
    model = Phi3ForCausalLM(config).eval()
    with pytest.raises(BuildError, match="rotates all positions differently once a sequence is longer than 16"):
        export_decoder(model, tmp_path, capacity=CAPACITY)
    export_decoder(model, tmp_path, capacity=16)


def test_a_model_that_computes_something_else_in_this_form_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an architecture would whose attention does more than the interface tells."""
    model = make_model("llama")
    attend = graph._Step.attend

    def other(step: Any, module: Any, query: Any, *rest: Any, **options: Any) -> Any:
        return attend(step, module, query * 1.1, *rest, **options)

    monkeypatch.setattr(graph._Step, "attend", other)
    with pytest.raises(BuildError, match="with its cache in buffers gives other logits"):
        export_decoder(model, tmp_path, capacity=CAPACITY)
    assert not list(tmp_path.iterdir())
