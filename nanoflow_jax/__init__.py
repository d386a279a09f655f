"""A serving engine for large language models that overlaps compute, memory and network inside each GPU.

Importing this package imports nothing else, so that `nanoflow_jax.config` and `nanoflow_jax.plan` stay free of jax.
Start at `nanoflow_jax.runtime.llm.LLM` to generate text, or at `python -m serve` to answer over RPC.
"""
