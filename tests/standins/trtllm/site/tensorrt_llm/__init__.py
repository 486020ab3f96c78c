"""Stand-in for the package ``tensorrt_llm``; see tests/standins/trtllm."""

from tests.standins.trtllm import settings
from tests.standins.trtllm.library import SamplingParams

__version__ = settings()["version"]
print(f"[TensorRT-LLM] TensorRT-LLM version: {__version__}")  # the real one greets on import

if settings()["profile"] == "engine":
    from tests.standins.trtllm.library import BuildConfig

__all__ = ["BuildConfig", "SamplingParams"]
