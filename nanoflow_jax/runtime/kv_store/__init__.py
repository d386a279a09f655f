"""Memory tiers for K and V pages: host memory, then SSD. No jax in here; see docs/kv-offload.md."""

from nanoflow_jax.runtime.kv_store.directory import DirectoryInUseError
from nanoflow_jax.runtime.kv_store.faults import Fault
from nanoflow_jax.runtime.kv_store.fingerprint import fingerprint
from nanoflow_jax.runtime.kv_store.loading import LoadedPages
from nanoflow_jax.runtime.kv_store.stats import TierStats
from nanoflow_jax.runtime.kv_store.store import CachedPrefix, KVStore, StoreStats

__all__ = ["CachedPrefix", "DirectoryInUseError", "Fault", "KVStore", "LoadedPages", "StoreStats", "TierStats", "fingerprint"]
