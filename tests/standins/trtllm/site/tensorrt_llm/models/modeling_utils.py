from tests.standins.trtllm.library import Mapping, QuantConfig

__all__ = ["Mapping", "QuantConfig"]
