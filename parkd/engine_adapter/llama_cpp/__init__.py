"""llama.cpp in process, for GGUF models. Needs llama-cpp-python (the extra `llama-cpp`)."""
