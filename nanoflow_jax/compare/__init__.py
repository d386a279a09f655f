"""The same step executed in every mode, beside each other: `python -m nanoflow_jax.compare --model M --b-dense B --workload W`.

How each figure comes about is in docs/performance.md.
"""
