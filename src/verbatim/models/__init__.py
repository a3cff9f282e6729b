"""Loads models, tokenizers and chat templates from Hugging Face folders and ids."""
