"""What Llama and AsyncLlama are made of: opening a model, and their methods."""
