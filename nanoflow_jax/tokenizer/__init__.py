"""Text to token ids and back, chat templates, and streaming detokenization. Imports no jax."""

from nanoflow_jax.tokenizer.adapter import IncrementalDetokenizer as IncrementalDetokenizer
from nanoflow_jax.tokenizer.adapter import Tokenizer as Tokenizer
from nanoflow_jax.tokenizer.adapter import load_tokenizer as load_tokenizer
from nanoflow_jax.tokenizer.chat_template import ChatTemplate as ChatTemplate
from nanoflow_jax.tokenizer.chat_template import ChatTemplateError as ChatTemplateError
from nanoflow_jax.tokenizer.decoding import TokenizerError as TokenizerError
from nanoflow_jax.tokenizer.from_gguf import tokenizer_from_gguf as tokenizer_from_gguf
