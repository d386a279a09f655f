"""Persistent Pallas Mosaic GPU kernels with an SM budget, and a plain jnp reference for each in `pallas_kernels.reference`."""
