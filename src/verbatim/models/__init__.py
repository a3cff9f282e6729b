"""A Hugging Face folder or id to a model, its tokenizer and its chat template."""
