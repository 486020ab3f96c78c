from tests.standins.trtllm.library import CompletionRequest

__all__ = ["CompletionRequest"]
