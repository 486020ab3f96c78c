from tests.standins.trtllm.library import KvCacheConfig

__all__ = ["KvCacheConfig"]
