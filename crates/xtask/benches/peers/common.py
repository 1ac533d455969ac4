"""Shared code of the peers' scripts: the embedded models, prompts and rows, and the exchange of
measurements."""

import argparse
import json
import sys
import time
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

MAX_THREADS = 2
ROOT = Path(__file__).resolve().parents[4]
MODELS = ROOT / "checkpoints" / "tiny"
RECIPE = tomllib.loads((ROOT / "recipes" / "tiny-full.toml").read_text())


def arguments(**defaults):
    """Parses `--json` and one flag for each default, with its name and type (`False` makes a switch)."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--json", action="store_true", help="run one measurement for each line of stdin and print JSON")
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()


def read_settings(text):
    """A training's settings from our JSON, with the optimizer's settings merged in."""
    settings = json.loads(text)
    return {**settings, **settings.get("optimizer", {})}


def serve(args, warm_up, work, set_threads=torch.set_num_threads, versions=None):
    """Runs `work` once for each line of stdin; without `--json` once. `work` returns its results, with the
    number of tokens as `num_tokens`. The seconds are added here unless `work` returns them."""
    num_threads = best_threads(warm_up, set_threads)
    if not args.json:
        seconds, done = timed(work)
        seconds = done.get("seconds", seconds)
        print(f"{done['num_tokens'] / seconds:.0f} tokens/s, threads: {num_threads}")
        return
    versions = versions or f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(json.dumps({"num_threads": num_threads, "versions": versions}), flush=True)
    for _ in sys.stdin:
        seconds, done = timed(work)
        print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes(), **done}), flush=True)


def peak_bytes():
    """The peak memory of this process, if Linux reports it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def best_threads(warm_up, set_threads):
    """Warms up with each number of threads and keeps the fastest. In steps this small a second thread can
    cost more than it gains, and the peer should be measured at its best."""
    seconds = {}
    for num_threads in range(1, MAX_THREADS + 1):
        set_threads(num_threads)
        warm_up()
        seconds[num_threads] = min(timed(warm_up)[0] for _ in range(2))
    best = min(seconds, key=seconds.get)
    set_threads(best)
    return best


def timed(work):
    """The seconds that `work` takes, and its result."""
    start = time.perf_counter()
    done = work()
    return time.perf_counter() - start, done


def load(name):
    """The embedded model with this name, or the model at this path, in float32 for inference."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def ordinary_tokens(num_tokens):
    """A prompt of ordinary tokens, with the same ids as on our side (`timed.rs`)."""
    return [270 + i * 37 % 300 for i in range(num_tokens)]


def read_prompts(path, num_prompts, model="target"):
    """The ids of a file's first prompts, with the model's chat template: tensors `[1, seq]`."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / model)
    with open(path) as file:
        records = [json.loads(line) for line, _ in zip(file, range(num_prompts))]
    prompts = []
    for record in records:
        messages = [{"role": "user", "content": record["prompt"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        prompts.append(torch.tensor([ids]))
    return prompts


def read_rows(data, columns):
    """The rows of build-data, as dictionaries of lists."""
    shards = sorted(Path(data).glob("responses-*.parquet"))
    return [row for shard in shards for row in pq.read_table(shard, columns=columns).to_pylist()]


def pad(sequences):
    """Sequences of ids, `[batch, seq]`, padded on the right, which a causal model ignores."""
    tensors = [torch.tensor(ids) for ids in sequences]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
