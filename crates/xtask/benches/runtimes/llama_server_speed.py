"""Tokens per second of llama.cpp's server, plain and with a draft, in turn for each prompt.

    python llama_server_speed.py LLAMA_SERVER TARGET.gguf DRAFT.gguf PROMPTS.json THREADS -- SPECULATION_FLAGS

PROMPTS.json is a list of {"prompt_ids": [...], "num_tokens": N} from `draft_model_speed.py`. The script starts and
stops two servers. SPECULATION_FLAGS are those that `tune --for draft-model` prints. Answers are greedy with N tokens,
and their time includes prefill. Prints the speeds and the server's time for a token after the prefill. The exit code is
1 if answers differ.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import urllib.request

PORTS = {"plain": 18131, "drafted": 18132}


def ask(way: str, path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORTS[way]}{path}", data, timeout=600) as answer:
        return json.load(answer)


def await_server(way: str, process: subprocess.Popen) -> None:
    for _ in range(600):
        try:
            ask(way, "/health")
            return
        except OSError:
            if process.poll() is not None:
                raise SystemExit(f"the {way} server ended with {process.returncode}")
            time.sleep(0.2)
    raise SystemExit(f"the {way} server does not answer")


def main() -> int:
    split = sys.argv.index("--")
    binary, target, draft, path, threads = sys.argv[1:split]
    more = {"plain": [], "drafted": ["--model-draft", draft, "--spec-draft-threads", threads, *sys.argv[split + 1:]]}
    processes = {
        way: subprocess.Popen([binary, "--model", target, "--port", str(PORTS[way]), "--threads", threads, "--ctx-size",
                               "2048", "--parallel", "1", *more[way]],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for way in PORTS
    }
    try:
        for way, process in processes.items():
            await_server(way, process)
        rows = json.load(open(path))
        seconds, steps, speedups, alike = dict.fromkeys(PORTS, 0.0), dict.fromkeys(PORTS, 0.0), [], 0
        drafted = accepted = 0
        for row in rows:
            taken, texts = {}, {}
            for way in PORTS:
                begun = time.perf_counter()
                answer = ask(way, "/completion", {"prompt": row["prompt_ids"], "n_predict": row["num_tokens"], "temperature": 0,
                                                  "samplers": ["temperature"], "cache_prompt": False, "ignore_eos": True})
                taken[way] = time.perf_counter() - begun
                texts[way] = answer["content"]
                seconds[way] += taken[way]
                steps[way] += answer["timings"]["predicted_ms"]
                drafted += answer["timings"].get("draft_n", 0)
                accepted += answer["timings"].get("draft_n_accepted", 0)
            alike += texts["plain"] == texts["drafted"]
            speedups.append(taken["plain"] / taken["drafted"])
    finally:
        for process in processes.values():
            process.terminate()
    tokens = sum(row["num_tokens"] for row in rows)
    print(f"llama.cpp: {len(rows)} prompts, {alike} alike; plain {tokens / seconds['plain']:.1f} tokens/s, drafted "
          f"{tokens / seconds['drafted']:.1f}: {seconds['plain'] / seconds['drafted']:.2f}x (median over prompts "
          f"{statistics.median(speedups):.2f}x); after the prefill {steps['plain'] / tokens:.2f} and "
          f"{steps['drafted'] / tokens:.2f} ms a token: {steps['plain'] / steps['drafted']:.2f}x; {drafted} drafted, "
          f"{accepted} accepted")
    return 0 if alike == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
