from tests.standins.trtllm.library import EngineLLM

LLM = EngineLLM

__all__ = ["LLM"]
