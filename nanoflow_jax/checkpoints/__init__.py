"""Weights from where they are stored to a `Decoder` on the mesh."""

from nanoflow_jax.checkpoints.layout import CheckpointError as CheckpointError
from nanoflow_jax.checkpoints.load import LoadedModel as LoadedModel
from nanoflow_jax.checkpoints.load import load_model as load_model
from nanoflow_jax.checkpoints.load import read_config as read_config
from nanoflow_jax.checkpoints.smollm2 import resolve_smollm2 as resolve_smollm2
