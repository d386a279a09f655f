"""Eight CPU devices for tensor parallelism, and jax's strictest promotion rules, before any test imports jax; no test fails
by the clock."""

import os

# Interpret mode holds one pool thread per waiting warpgroup; two cores' worth of threads deadlock.
os.environ.setdefault("PJRT_NPROC", "32")

import jax
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
