"""What servers want to hear: vLLM's words, which our own server speaks too, or those of ``trtllm-serve``.

Both answer in one form (``completion.py``): ``token_ids`` of a choice, the stop token included, and usage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pipeline.serving.completion import CompletionRequest

Dialect = Literal["vllm", "trtllm-serve"]


def trtllm_body(request: CompletionRequest, model: str) -> dict[str, Any]:
    """The JSON body for ``trtllm-serve``, which refuses every field that it does not know.

    ``detokenize`` false gives token ids instead of text. ``top_k`` 1 is greedy in every version (temperature 0 is
    not). The server's own end token would end an answer without being part of it on one backend and as part of it on
    the other, so it is switched off: only ids of ``stop_token_ids`` end an answer, and are part of it.
    """
    return {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "max_tokens": request.max_tokens,
        "n": 1,
        "top_k": 1,
        "stop_token_ids": [] if request.ignore_eos else list(request.stop_token_ids),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "detokenize": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
