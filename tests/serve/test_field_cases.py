"""Faults that users of other engines met, as seen through a server and its client. The numbers are those of
docs/serving.md's list; what concerns the engine alone is tested with the engine."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoflow_jax.runtime.request import FinishReason, SamplingParams
from serve.async_client import ServerError
from tests.runtime.mock_runner import MockRunner, plain_decode, tiny_config
from tests.serve.serving import VOCAB_SIZE, mock_runner, run, serving, tokenizer
