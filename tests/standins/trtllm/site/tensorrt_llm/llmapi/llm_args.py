from tests.standins.trtllm.library import TorchLlmArgs, TrtLlmArgs

__all__ = ["TorchLlmArgs", "TrtLlmArgs"]
