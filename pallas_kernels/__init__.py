"""Persistent Pallas Mosaic GPU kernels with an SM budget, and a plain jnp reference for each in `pallas_kernels.reference`."""

from pallas_kernels._mosaic import UnsupportedDeviceError as UnsupportedDeviceError
from pallas_kernels.append_kv import append_kv as append_kv
from pallas_kernels.decode_attention import decode_attention as decode_attention
from pallas_kernels.fused_gemm_attention import gemm_with_decode_attention as gemm_with_decode_attention
from pallas_kernels.gemm import gemm as gemm
from pallas_kernels.grouped_gemm import grouped_gemm as grouped_gemm
from pallas_kernels.prefill_attention import prefill_attention as prefill_attention
