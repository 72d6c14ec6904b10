"""llama.cpp in process, for GGUF models. Needs llama-cpp-python (the extra `llama-cpp`)."""

from parkd.engine_adapter.llama_cpp.config import CACHE_TYPES, LlamaCppConfig

__all__ = ["CACHE_TYPES", "LlamaCppConfig"]
