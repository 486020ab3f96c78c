"""Probes: what is saved is what is read, and the divergence of a hand calculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.quantize.probe import STEPS, Probe, agreement, probe_model


def test_agreement_by_hand() -> None:
    """p = (1/2, 1/2), q = (3/4, 1/4): KL = 1/2 ln(2/3) + 1/2 ln 2 = 0.143841; the other position is equal."""
    reference = np.array([[[0.0, 0.0], [0.0, 1.0]]], np.float32)
    engine = np.array([[[np.log(3.0), 0.0], [0.0, 1.0]]], np.float32)
    found = agreement(reference, engine)
    assert found.max_kl == pytest.approx(0.143841, abs=1e-6)
    assert found.mean_kl == pytest.approx(0.143841 / 2, abs=1e-6)
    assert found.top1 == 1.0
    half = np.array([[[1.0, 0.0], [1.0, 0.0]]], np.float32)
    assert agreement(reference, half).top1 == 0.5


def test_a_probe_survives_its_file_and_knows_the_models_noise(tiny_model: Any, tmp_path: Path) -> None:
    samples = [[5, 6], list(range(5, 15)), list(range(20, 28))]
    probe = probe_model(tiny_model, samples)
    assert probe.tokens == samples[1:]  # the first is too short
    assert probe.logits.shape == (2, STEPS, 85)
    assert 0 < probe.noise < 1e-6  # float32 without quantisation: next to none
    probe.save(tmp_path / "probe.npz")
    read = Probe.load(tmp_path / "probe.npz")
    assert (read.tokens, read.noise) == (probe.tokens, probe.noise)
    np.testing.assert_array_equal(read.logits, probe.logits)
