"""Fixtures that several folders share. Hubs are out of reach on purpose: nothing here may need the network."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Time never decides a test: examples may take long on a busy machine.
settings.register_profile("enginegate", deadline=None)
settings.load_profile("enginegate")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell starts what runs in its background with Ctrl-C ignored, and children inherit that: a test that interrupts a
# child would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained checkpoint folder. Read only: copy it before changing it."""
    from tests.tiny import write_checkpoint

    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_checkpoint(folder)
    return folder


@pytest.fixture
def tiny_model(tiny_checkpoint: Path) -> Any:
    """The tiny model, loaded afresh."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
