"""What programs written for llama-cpp-python also name: caches, draft models, arguments."""
