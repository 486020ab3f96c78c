from tests.standins.trtllm.library import MODEL_MAP

__all__ = ["MODEL_MAP"]
