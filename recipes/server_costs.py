#!/usr/bin/env python3
"""Measures the duration of forwards on an OpenAI-compatible server and prints the recipe table `[tune.costs]`.

    python3 server_costs.py TARGET_URL [--draft DRAFT_URL] [--rows 5] [--keys]

TARGET_URL, such as http://127.0.0.1:8080, serves the target without speculation and batches at least `--rows`
requests. DRAFT_URL serves the draft. The script sends greedy requests to `/v1/completions` and `/v1/models` and
needs only the standard library.

A request for L tokens takes a prefill and L - 1 steps. The difference between a long and a short answer to one
prompt therefore measures only steps; network, queue and prefill cancel out. A single request measures target
forwards of one row, and N concurrent requests, whose steps the server batches, measure forwards of N rows. Each
round measures everything in turn, so that a slowdown of the machine affects everything, and results are medians
over rounds.

Two limits: the rows of a verification share the cache of one sequence, but N requests have N caches, so costs of
rows are slightly too high for long contexts. A served draft includes the server's overhead per token, part of
which a runtime avoids when it drafts by itself, so `draft_ms` is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request

SHORT, LONG = 4, 36
"""Lengths of the two answers, in tokens."""
FIRST_OF_LAST = 0.7
"""Concurrent requests count as batched if the first answer takes at least this fraction of the last one's time."""
WORDS = "river stone lantern market winter engine garden paper signal harbour copper bridge window field letter".split()


class Failed(Exception):
    """An error message for the user."""


class Server:
    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.model = model or self.ask("/v1/models")["data"][0]["id"]

    def ask(self, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise Failed(f"{self.url}{path}: {error}: {error.read().decode(errors='replace')[:300]}") from error
        except (OSError, ValueError) as error:
            raise Failed(f"{self.url}{path}: {error}; hint: is the server running, and does it support OpenAI's API?") from error

    def complete(self, prompt: str, num_tokens: int) -> float:
        """The duration in seconds of an answer of `num_tokens` tokens."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        begun = time.perf_counter()
        answer = self.ask("/v1/completions", body)
        taken = time.perf_counter() - begun
        given = answer.get("usage", {}).get("completion_tokens", num_tokens)
        if given != num_tokens:
            raise Failed(f"an answer ended after {given} of {num_tokens} tokens; hint: the server ignores "
                         "`ignore_eos`; try another text with `--prompt`")
        return taken

    def at_once(self, prompts: list[str], num_tokens: int) -> float:
        """The duration in seconds of the answers to all prompts, requested concurrently."""
        taken: list[float] = []
        failures: list[Failed] = []

        def answer(prompt: str) -> None:
            start.wait()
            try:
                taken.append(self.complete(prompt, num_tokens))
            except Failed as failure:
                failures.append(failure)

        start = threading.Barrier(len(prompts))
        threads = [threading.Thread(target=answer, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        if num_tokens == LONG and min(taken) < FIRST_OF_LAST * max(taken):
            raise Failed(f"the server does not batch {len(prompts)} concurrent requests (the first answer took "
                         f"{min(taken):.2f} s, the last {max(taken):.2f} s); hint: raise its batch size (llama.cpp: "
                         "`--parallel`, vLLM: `--max-num-seqs`) or lower `--rows`")
        return max(taken)

    def step(self, prompts: list[str]) -> float:
        """The duration in milliseconds of one step for all prompts."""
        short, long = (self.at_once(prompts, num_tokens) for num_tokens in (SHORT, LONG))
        return 1e3 * (long - short) / (LONG - SHORT)


def summary(of: list[float]) -> tuple[float, float]:
    """The median and half the interquartile range relative to it."""
    middle = statistics.median(of)
    quarters = statistics.quantiles(of, n=4)
    return middle, (quarters[2] - quarters[0]) / 2 / middle


def measure(arguments: argparse.Namespace) -> str:
    target = Server(arguments.target, arguments.model, arguments.key)
    draft = Server(arguments.draft, arguments.draft_model, arguments.key) if arguments.draft else None
    text = arguments.prompt or " ".join(WORDS[at % len(WORDS)] for at in range(arguments.words))
    # Equal except for the end, so that a server with a prefix cache has little to prefill, and answers differ.
    prompts = [f"{text} {WORDS[at % len(WORDS)]} {at}:" for at in range(arguments.rows)]
    ways = {f"{rows} row{'s'[:rows > 1]}": (target, prompts[:rows]) for rows in range(1, arguments.rows + 1)}
    if draft:
        ways["draft"] = (draft, prompts[:1])
    for name, (server, some) in ways.items():
        print(f"warming up: {name}", file=sys.stderr)
        server.at_once(some, LONG)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for nth in range(arguments.rounds):
        for name, (server, some) in ways.items():
            found[name].append(server.step(some))
        print(f"round {nth + 1} of {arguments.rounds}", file=sys.stderr)
    medians = {name: summary(of) for name, of in found.items()}
    for name, (middle, spread) in medians.items():
        print(f"{name}: {middle:.3f} ms ± {100 * spread:.0f} %", file=sys.stderr)
    if min(middle for middle, _ in medians.values()) <= 0:
        raise Failed("long answers took no longer than short ones; hint: use more `--rounds` on an idle machine")
    rows = ", ".join(f"{medians[name][0]:.3f}" for name in ways if name != "draft")
    table = [] if arguments.keys else ["[tune.costs]"]
    table.append(f"# {target.model}, {arguments.rounds} rounds, "
                 f"± {100 * max(spread for _, spread in medians.values()):.0f} % at most")
    if draft:
        table.append(f"draft_ms = {medians['draft'][0]:.3f}")
    table.append(f"rows_ms = [{rows}]" if arguments.rows > 1 else f"target_ms = {rows}")
    return "\n".join(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures forwards on an OpenAI-compatible server for `[tune.costs]`.")
    parser.add_argument("target", help="URL of the target's server, without speculation: http://HOST:PORT")
    parser.add_argument("--draft", help="URL of the draft's server; without it, the table has no `draft_ms`")
    parser.add_argument("--rows", type=int, default=5, help="largest number of rows, one more than the longest round (5)")
    parser.add_argument("--rounds", type=int, default=9, help="number of measurements of each (9)")
    parser.add_argument("--words", type=int, default=150, help="length of prompts in words (150)")
    parser.add_argument("--prompt", help="text of the prompts, instead of `--words`")
    parser.add_argument("--model", help="target's name on its server; by default, the first in its list")
    parser.add_argument("--draft-model", help="draft's name on its server; by default, the first in its list")
    parser.add_argument("--key", help="API key of the servers")
    parser.add_argument("--keys", action="store_true", help="print only the keys, as a file for `--costs`")
    arguments = parser.parse_args()
    if arguments.rows < 1 or arguments.rounds < 3:
        parser.error("--rows must be at least 1, --rounds at least 3")
    try:
        print(measure(arguments))
    except Failed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
