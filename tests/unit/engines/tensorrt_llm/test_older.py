"""Folders that transformers 4 reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.engines.tensorrt_llm.older import older_config, older_tokenizer_config, write_tokenizer
from pipeline.errors import BuildError
from pipeline.files import read_json


def test_rotary_parameters_get_their_older_names() -> None:
    """transformers 4 would take a base of 10000 for this model, which has 500000."""
    llama3 = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    found = older_config({"rope_parameters": llama3, "dtype": "bfloat16"})
    assert found["rope_theta"] == 500000.0
    assert found["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    assert found["torch_dtype"] == "bfloat16"
    assert found["rope_parameters"] == llama3, "the newer names stay"
    assert older_config({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}})["rope_scaling"] is None
    assert older_config({"rope_theta": 3.0})["rope_theta"] == 3.0
    with pytest.raises(BuildError, match="several rotary embeddings"):
        older_config({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}})


def test_a_tokenizer_gets_its_older_class(tmp_path: Path, tiny_checkpoint: Path) -> None:
    assert read_json(tiny_checkpoint / "tokenizer_config.json")["tokenizer_class"] == "TokenizersBackend"
    write_tokenizer(tiny_checkpoint, tmp_path / "tokenizer")
    config = read_json(tmp_path / "tokenizer/tokenizer_config.json")
    assert (config["tokenizer_class"], config["eos_token"]) == ("PreTrainedTokenizerFast", "</s>")
    assert "backend" not in config
    assert not list((tmp_path / "tokenizer").glob("*.safetensors"))
    listed = older_tokenizer_config({"extra_special_tokens": ["<a>"], "tokenizer_class": "LlamaTokenizerFast"})
    assert listed == {"additional_special_tokens": ["<a>"], "tokenizer_class": "LlamaTokenizerFast"}
    from transformers import AutoTokenizer

    older = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    newer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    text = "translate a1 a2 =>"
    assert older(text)["input_ids"] == newer(text)["input_ids"]
