"""Greedy decoding with llama.cpp, one token a step. The prompt is not timed."""

import time

import llama_cpp
import numpy
from common import arguments, ordinary_tokens, serve

args = arguments(gguf="", prompt_len=16, num_tokens=64)
prompt = ordinary_tokens(args.prompt_len)
model = None


def set_threads(num_threads):
    global model
    model = llama_cpp.Llama(
        args.gguf, n_ctx=2048, n_threads=num_threads, n_threads_batch=num_threads, verbose=False
    )


def step(ids):
    """Reads `ids` and returns the most probable next token."""
    model.eval(ids)
    logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return int(numpy.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).argmax())


def work():
    model.reset()
    answer = [step(prompt)]
    begun = time.perf_counter()
    for _ in range(args.num_tokens):
        answer.append(step(answer[-1:]))
    seconds = time.perf_counter() - begun
    done = {"num_tokens": args.num_tokens, "prompt_ids": [prompt], "token_ids": [answer]}
    return {"seconds": seconds, **done}


serve(args, work, work, set_threads, f"llama-cpp-python {llama_cpp.__version__}")
