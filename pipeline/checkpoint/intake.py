"""Intake: a checkpoint is read once, tensor by tensor, and refused for what would make a bad engine later.

What is cheap comes first (files, headers, config, tokenizer); the bytes of the weights are read last, once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.checkpoint.architecture import check_architecture, check_tying
from pipeline.checkpoint.fingerprints import fingerprints
from pipeline.checkpoint.layout import read_layout
from pipeline.checkpoint.tensors import FP16_MAX, read_headers, scan_tensors, weights_fingerprint
from pipeline.checkpoint.vocabulary import check_template, check_vocabulary, end_ids, load_tokenizer
from pipeline.files import digest_file


def inspect_checkpoint(folder: Path, *, needs_template: bool, trust_remote_code: bool = False) -> dict[str, Any]:
    """Checks a checkpoint folder and describes it as JSON.

    Keys: ``architecture``, ``parameters``, ``dtypes`` (dtype -> values), ``layers``, ``vocabulary`` (rows of the
    embedding), ``tied_embeddings``, ``eos_token_ids``, ``bos`` (who writes it), ``fp16_overflow`` (names of tensors
    with values beyond FP16), ``fingerprints``, ``trust_remote_code``, ``remote_code`` (digests of the code files
    that were allowed) and ``warnings`` (texts for people).
    Raises CheckpointError naming the file or tensor and the next step.
    """
    layout = read_layout(folder, trust_remote_code=trust_remote_code)
    headers = read_headers(layout)
    architecture = check_architecture(layout, headers, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    check_vocabulary(folder, tokenizer, architecture.vocabulary)
    ends = end_ids(folder, layout.config, tokenizer, architecture.vocabulary)
    bos = check_template(folder, tokenizer) if needs_template else {}
    stored = scan_tensors(layout, headers)

    warnings = [warning] if (warning := check_tying(layout, architecture, stored)) else []
    overflow = {name: part.largest for name, part in stored.items() if part.largest and part.largest > FP16_MAX}
    if overflow:
        largest, worst = max((value, name) for name, value in overflow.items())
        warnings.append(
            f"{len(overflow)} tensors hold values beyond FP16 ({FP16_MAX:g}), up to {largest:g} in {worst}: "
            "in FP16 they become infinite, so serve the baseline in BF16 (baseline.dtype)"
        )
    if bos.get("tokenizer_adds_bos") and not bos.get("template_writes_bos"):
        warnings.append("the tokenizer adds a begin-of-sequence token, the chat template writes none: chats have none")
    dtypes: dict[str, int] = {}
    for part in stored.values():
        dtypes[part.dtype] = dtypes.get(part.dtype, 0) + part.values
    return {
        "architecture": architecture.name,
        "parameters": sum(dtypes.values()),
        "dtypes": dtypes,
        "layers": architecture.layers,
        "vocabulary": architecture.vocabulary,
        "tied_embeddings": architecture.tied,
        "eos_token_ids": ends,
        "bos": bos,
        "fp16_overflow": sorted(overflow),
        "fingerprints": fingerprints(folder, tokenizer, weights_fingerprint(stored)),
        "trust_remote_code": trust_remote_code,
        "remote_code": {path.name: digest_file(path) for path in layout.code},
        "warnings": warnings,
    }
