"""GGUF files (llama.cpp's format): read as the folder of Hugging Face files that they were made from."""
