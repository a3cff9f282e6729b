"""Models, tokenizers and chat templates, loaded from Hugging Face folders or hub ids.

In: a model folder or a hub id. Out: a model, and a renderer (`renderers`) that turns messages into ids and ids into
messages. `native` compiles and loads the C helpers. Read first: `loading.py`, `renderers/renderer.py`. Imports `core`
and `config`.
"""
