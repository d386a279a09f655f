"""Hypothesis strategies for every message of the protocol."""

import string

from hypothesis import strategies as st

from nanoflow_jax.runtime.request import FinishReason, SamplingParams, Timing, TokenLogprobs, Usage
from serve import protocol

ids = st.integers(0, protocol.MAX_REQUEST_ID)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
texts = st.text(max_size=40)
words = st.text(string.ascii_lowercase, min_size=1, max_size=8)
floats = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31 - 1)

params = st.builds(
    SamplingParams,
    temperature=floats,
    top_k=counts,
    top_p=floats,
    min_p=floats,
    seed=st.none() | st.integers(0, 2**32 - 1),
    logprobs=st.none() | counts,
    max_tokens=counts,
    stop_token_ids=st.lists(counts, max_size=4).map(tuple),
    stop=st.lists(texts, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
)
chat_messages = st.builds(protocol.ChatMessage, role=texts, content=texts)
prompts = (
    st.builds(protocol.Text, text=texts)
    | st.builds(protocol.TokenIds, token_ids=token_ids)
    | st.builds(protocol.Chat, messages=st.lists(chat_messages, max_size=3))
)
hellos = st.builds(protocol.Hello, version=st.just(protocol.PROTOCOL_VERSION), token=st.none() | texts)
requests = st.one_of(
    st.builds(
        protocol.Generate,
        id=ids,
        prompt=prompts,
        params=params,
        stream=st.booleans(),
        session_id=st.none() | texts,
        cache_salt=st.none() | texts,
    ),
    st.builds(protocol.Cancel, id=ids, target=ids),
    st.builds(protocol.Tokenize, id=ids, text=texts, add_special_tokens=st.booleans()),
    st.builds(protocol.Detokenize, id=ids, token_ids=token_ids, skip_special_tokens=st.booleans()),
    st.builds(protocol.GetModelInfo, id=ids),
    st.builds(protocol.GetStats, id=ids),
    st.builds(protocol.GetHealth, id=ids),
)
client_messages = hellos | requests

logprobs = st.none() | st.lists(
    st.builds(TokenLogprobs, token_id=counts, logprob=floats, top=st.lists(st.tuples(counts, floats), max_size=3)), max_size=3
)
descriptions = st.builds(
    protocol.ModelDescription,
    name=texts,
    **{
        field: counts
        for field in (
            "vocab_size",
            "num_params",
            "num_layers",
            "max_context",
            "pool_tokens",
            "page_size",
            "b_dense",
            "tp_size",
        )
    },
    dtype=words,
    eos_token_ids=token_ids,
    has_tokenizer=st.booleans(),
    has_chat_template=st.booleans(),
)
answers = st.one_of(
    st.builds(protocol.Delta, id=ids, text=texts, token_ids=token_ids, logprobs=logprobs),
    st.builds(
        protocol.Finished,
        id=ids,
        finish_reason=st.sampled_from(FinishReason),
        text=texts,
        token_ids=token_ids,
        usage=st.builds(Usage, prompt_tokens=counts, output_tokens=counts, cached_tokens=counts),
        timing=st.builds(Timing, admitted_s=st.none() | floats, first_token_s=st.none() | floats, finished_s=floats),
        logprobs=logprobs,
    ),
    st.builds(protocol.Cancelled, id=ids, was_running=st.booleans()),
    st.builds(protocol.Tokens, id=ids, token_ids=token_ids),
    st.builds(protocol.Detokenized, id=ids, text=texts),
    st.builds(protocol.ModelInfo, id=ids, model=descriptions),
    st.builds(protocol.Stats, id=ids, engine=st.dictionaries(words, floats), server=st.dictionaries(words, floats)),
    st.builds(protocol.Health, id=ids, state=words, error=st.none() | texts, step_age_s=floats),
    st.builds(protocol.Error, code=st.sampled_from(protocol.ErrorCode), message=texts, id=st.none() | ids),
)
welcomes = st.builds(protocol.Welcome, version=counts, server=texts, model=texts, max_frame_bytes=counts)
server_messages = welcomes | answers
