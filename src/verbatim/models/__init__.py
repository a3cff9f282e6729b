"""Models, tokenizers and chat templates, from Hugging Face folders and ids.

In: a folder or a name. Out: a model, and a renderer (`renderers`): messages to ids and back. `native` compiles and
loads the helpers in C. Read first: `loading.py`, `renderers/renderer.py`. Imports `core`, `config`.
"""
