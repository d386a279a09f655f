import dataclasses
import subprocess
import sys

import pytest

from nanoflow_jax.config import RopeScaling, preset
from nanoflow_jax.runtime.kv_store import fingerprint

CONFIG = preset("llama3-8b")
FACTS = {"weights": "abc", "dtype": "bfloat16", "page_size": 16, "page_layout": "LKTH"}


def test_every_fact_changes_it():
    base = fingerprint(CONFIG, **FACTS)
    others = [fingerprint(CONFIG, **{**FACTS, name: value * 2}) for name, value in FACTS.items()]
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192)
    for change in (
        {"rope_theta": 1e4},
        {"rope_scaling": scaling},
        {"num_layers": 31},
        {"rms_norm_eps": 1e-6},
        {"qkv_bias": True},
    ):
        others.append(fingerprint(dataclasses.replace(CONFIG, **change), **FACTS))
    assert len(base) == 32
    assert len({base, *others}) == 1 + len(others)


def test_what_does_not_enter_k_and_v_does_not():
    same = dataclasses.replace(CONFIG, name="elsewhere", max_context=64, eos_token_ids=(1,), bos_token_id=None)
    assert fingerprint(same, **FACTS) == fingerprint(CONFIG, **FACTS)


def test_is_the_same_in_another_process():
    code = f"from tests.runtime.kv_store.test_fingerprint import *; print(fingerprint(CONFIG, **{FACTS!r}).hex())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == fingerprint(CONFIG, **FACTS).hex()


def test_unnamed_weights_are_refused():
    with pytest.raises(ValueError, match="weights=''"):
        fingerprint(CONFIG, **{**FACTS, "weights": ""})


def test_the_package_needs_no_jax():
    code = "import sys, nanoflow_jax.runtime.kv_store, nanoflow_jax.runtime.kv_store.bench; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
