"""The trainings of `../gpu/` in torch, eager and compiled, with the same shapes, rows in a step, precision
(bf16 products, f32 parameters, softmaxes and losses) and count of operations. Plain torch with its fused
attention and fused AdamW. Prints one JSON object for each training; `--table FILE` prints a file of them as
a table, theirs and ours."""

import argparse
import contextlib
import json
import statistics
import sys
import time

SEED = 7


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--table", metavar="FILE", help="print a file of JSON objects, one per line, as a table")
    add("--device", default="cuda")
    add("--work", choices=["adapter", "head", "eagle3"])
    add("--compile", action="store_true", help="use `torch.compile`")
    add("--dtype", choices=["f32", "bf16"], default="bf16")
    shape = dict(hidden=4096, layers=32, heads=32, intermediate=11008, vocab=32000)
    step = dict(exit_layer=2, unrolled=5, head_layers=3, seq=1024, supervised=768, rows=4, accumulation=1)
    # Our side computes logits in chunks; here all of them are in memory at once.
    for name, default in (shape | step | dict(loss_chunk=0, warm_up=5, steps=20)).items():
        add("--" + name.replace("_", "-"), type=int, default=default)
    add("--peak-tflops", type=float, default=989.0)
    add("--json", action="store_true", help="ignored: the output is always JSON")
    return parser.parse_args()


args = arguments()


def attention_flops(rows):
    return rows * args.seq * (8 * args.hidden**2 + 2 * args.hidden * (args.seq + 1))


def step_flops():
    """The operations, counted as in `../gpu/flops.rs`."""
    rows = args.rows * (args.accumulation if args.work == "head" else 1)
    mlp = 6 * args.hidden * args.intermediate * rows * args.seq
    frozen = args.layers * (attention_flops(rows) + mlp)
    if args.work == "adapter":
        lm_head = 2 * args.hidden * args.vocab * rows * args.supervised
        return frozen + 3 * attention_flops(rows) + 3 * lm_head
    if args.work == "eagle3":
        square, tokens = 2 * args.hidden**2, rows * args.supervised
        lm_head = 2 * args.hidden * args.vocab
        known = rows * args.seq * 8 * square
        step = tokens * (2 * square + 6 * args.hidden * args.intermediate + lm_head)
        later = tokens * 2 * square
        scores = args.unrolled * tokens * 2 * args.hidden * (args.seq + 1)
        drafter = known + args.unrolled * step + (args.unrolled - 1) * later + scores
        return frozen + tokens * lm_head + 3 * drafter
    block, output = 2 * args.hidden**2, 4 * args.hidden
    first = block if args.head_layers else output
    head = 3 * (args.head_layers * block + output) - first
    return frozen + head * rows * args.supervised


def table(path):
    """Medians over the runs in a file, and ratios to torch compiled, or to eager if that is missing."""
    with open(path) as file:
        runs = [json.loads(line) for line in file]
    is_complete = True
    for work in ("adapter", "head", "eagle3"):
        by = {}
        for run in runs:
            if run["work"] == work:
                by.setdefault(run["by"], []).append(run)
        if not by:
            continue
        flops = {run["flops_per_step"] for some in by.values() for run in some}
        tokens = {run["tokens_per_step"] for some in by.values() for run in some}
        if len(flops) > 1 or len(tokens) > 1:
            print(f"{work}: the sides count differently: {sorted(flops)}, {sorted(tokens)}")
            is_complete = False
        rates = {
            name: statistics.median(run["tokens_per_second"] for run in some)
            for name, some in by.items()
        }
        yardstick = next((name for name in ("torch compiled", "torch eager") if name in rates), None)
        print(f"\n{work} training, {tokens.pop()} tokens a step, {flops.pop() / 1e12:.2f} TFLOP a step")
        print("| by | tokens/s | ms a step | MFU | card's memory, GB | runs | ratio |")
        print("|---|---|---|---|---|---|---|")
        for name, some in by.items():
            milliseconds = 1e3 * statistics.median(run["seconds_per_step"] for run in some)
            mfu = 100 * statistics.median(run["mfu"] for run in some)
            memory = [run["card_bytes"] for run in some if run.get("card_bytes")]
            memory = f"{max(memory) / 1e9:.1f}" if memory else "-"
            ratio = f"{rates[name] / rates[yardstick]:.2f} x {yardstick}" if yardstick else "-"
            print(
                f"| {name} | {rates[name]:.0f} | {milliseconds:.1f} | {mfu:.1f} % | {memory} "
                f"| {len(some)} | {ratio} |"
            )
    return is_complete


if args.table:
    sys.exit(not table(args.table))

import torch
import torch.nn.functional as F
from torch import nn

DEVICE = torch.device(args.device)
IS_CUDA = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if args.dtype == "bf16" else torch.float32
HEAD_DIM = args.hidden // args.heads
# Autocast works on the CPU as on a GPU, but the times mean nothing.
PRECISION = (
    torch.autocast(DEVICE.type, DTYPE) if DTYPE == torch.bfloat16 else contextlib.nullcontext()
)


def rotary(seq):
    frequencies = 1e4 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE).float() / HEAD_DIM)
    angles = torch.outer(torch.arange(seq, device=DEVICE).float(), frequencies).repeat(1, 2)
    return angles.cos().to(DTYPE), angles.sin().to(DTYPE)


def rotate(x, tables):
    cos, sin = tables
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def linear(width, output, dtype):
    layer = nn.Linear(width, output, bias=False, device=DEVICE, dtype=dtype)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class Norm(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(args.hidden, device=DEVICE, dtype=dtype))

    def forward(self, x):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return (x * scale).to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(args.hidden, args.hidden, dtype) for _ in range(4))

    def forward(self, x, tables):
        q, k, v = (
            p(x).view(*x.shape[:2], args.heads, HEAD_DIM).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        q, k = rotate(q, tables), rotate(k, tables)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = Norm(DTYPE), Norm(DTYPE)
        self.attention = Attention(DTYPE)
        self.gate = linear(args.hidden, args.intermediate, DTYPE)
        self.up = linear(args.hidden, args.intermediate, DTYPE)
        self.down = linear(args.intermediate, args.hidden, DTYPE)

    def forward(self, x, tables):
        x = x + self.attention(self.before_attention(x), tables)
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Frozen(nn.Module):
    """A Llama with random weights in the type of its computations."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.hidden, device=DEVICE, dtype=DTYPE)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(args.layers))
        self.norm = Norm(DTYPE)
        self.lm_head = linear(args.hidden, args.vocab, DTYPE)
        self.tables = rotary(args.seq)
        self.requires_grad_(False)

    def forward(self, ids, *exit_layers):
        """The hidden states after each number of layers, and the normed final ones."""
        x = self.embed(ids)
        early = []
        for number, layer in enumerate(self.layers):
            if number in exit_layers:
                early.append(x)
            x = layer(x, self.tables)
        return *early, self.norm(x)


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = Norm(torch.float32), Norm(torch.float32)
        self.attention = Attention(torch.float32)

    def forward(self, x, tables):
        return self.after(x + self.attention(self.before(x), tables))


class Head(nn.Module):
    """Tied residual blocks: one block, applied at each depth."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(args.hidden, args.hidden, device=DEVICE)
        self.output = nn.Linear(args.hidden, 2, device=DEVICE)

    def forward(self, x):
        for _ in range(args.head_layers):
            x = x + F.silu(self.block(x))
        return self.output(x)


def adapter_loss(frozen, adapter, ids, _labels):
    with PRECISION:
        with torch.no_grad():
            early, last = frozen(ids, args.exit_layer)
            probs = frozen.lm_head(last[:, -args.supervised :]).float().softmax(-1)
        states = adapter(early, frozen.tables)[:, -args.supervised :]
        log_probs = frozen.lm_head(states).float().log_softmax(-1)
    return -(probs * log_probs).sum(-1).mean()


def head_loss(frozen, head, ids, labels):
    with PRECISION:
        with torch.no_grad():
            (last,) = frozen(ids)
        logits = head(last[:, -args.supervised :].flatten(0, 1)).float()
    log_probs = logits.log_softmax(-1)
    rejected = 6 * (1 - labels)
    return -(rejected * log_probs[:, 0] + labels * log_probs[:, 1]).sum() / (rejected + labels).sum()


class Drafter(nn.Module):
    """EAGLE-3's: one layer that reads embeddings and features, unrolled as in training."""

    def __init__(self):
        super().__init__()
        h = args.hidden
        self.fc = linear(3 * h, h, torch.float32)
        self.norms = nn.ModuleList(Norm(torch.float32) for _ in range(4))
        self.q, self.k, self.v = (linear(2 * h, h, torch.float32) for _ in range(3))
        self.o, self.head = linear(h, h, torch.float32), linear(h, args.vocab, torch.float32)
        self.gate, self.up = (linear(h, args.intermediate, torch.float32) for _ in range(2))
        self.down = linear(args.intermediate, h, torch.float32)

    def heads(self, x):
        return x.view(*x.shape[:2], args.heads, HEAD_DIM).transpose(1, 2)

    def forward(self, states, embedded, tables):
        """Log-probabilities of each step at the supervised positions."""
        first = args.seq - args.supervised
        g = self.fc(torch.cat(states, -1))
        embedded = self.norms[0](embedded)
        keys, values, given, mask = [], [], g, None
        rows = torch.arange(args.seq, device=DEVICE)
        for lag in range(args.unrolled):
            read = torch.cat([embedded, self.norms[1](given)], -1)
            late = read[:, first:]
            q = rotate(self.heads(self.q(late)), [t[first:] for t in tables])
            source = read if lag == 0 else late
            at = tables if lag == 0 else [t[first:] for t in tables]
            keys.append(rotate(self.heads(self.k(source)), at))
            values.append(self.heads(self.v(source)))
            scores = q @ keys[0].transpose(-1, -2) / HEAD_DIM**0.5
            hidden = rows[None] > rows[first:, None] - lag
            scores = scores.masked_fill(hidden, float("-inf"))
            delayed = lambda x, n: F.pad(x, (0, 0, n, 0))[:, :, : args.supervised]
            later = [(q * delayed(keys[i], lag - i)).sum(-1, keepdim=True) / HEAD_DIM**0.5 for i in range(1, lag + 1)]
            weights = torch.cat([scores, *later], -1).float().softmax(-1).to(q.dtype)
            mixed = weights[..., : args.seq] @ values[0]
            for i in range(1, lag + 1):
                mixed = mixed + weights[..., args.seq + i - 1, None] * delayed(values[i], lag - i)
            x = given[:, first:] + self.o(mixed.transpose(1, 2).flatten(2))
            y = self.norms[2](x)
            x = x + self.down(F.silu(self.gate(y)) * self.up(y))
            yield self.head(self.norms[3](x)).float().log_softmax(-1)
            given = torch.cat([given[:, :first], F.pad(x, (0, 0, 1, 0))[:, :-1]], 1)


def eagle3_loss(frozen, drafter, ids, _labels):
    with PRECISION:
        with torch.no_grad():
            *states, last = frozen(ids, 2, args.layers // 2, args.layers - 3)
            probs = frozen.lm_head(last[:, -args.supervised :]).float().softmax(-1)
            embedded = frozen.embed(ids.roll(-1, 1))
        losses = [
            -(probs * log_probs).sum(-1).mean() * 0.8**step
            for step, log_probs in enumerate(drafter(states, embedded, frozen.tables))
        ]
    return sum(losses)


def synchronize():
    if IS_CUDA:
        torch.cuda.synchronize()


def main():
    torch.manual_seed(SEED)
    frozen = Frozen()
    kinds = {"adapter": (Adapter, adapter_loss), "head": (Head, head_loss), "eagle3": (Drafter, eagle3_loss)}
    kind, loss_of = kinds[args.work]
    trained, accumulation = kind(), args.accumulation if args.work == "head" else 1
    if args.compile:
        loss_of = torch.compile(loss_of)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=5e-5, weight_decay=0.01, fused=IS_CUDA)
    losses, step_seconds = [], []
    synchronize()
    for number in range(args.warm_up + args.steps):
        begun = time.perf_counter()
        sum_of_losses = 0.0
        for _ in range(accumulation):
            # As on our side, ids come from the host and the loss is read once a step.
            ids = torch.randint(args.vocab, (args.rows, args.seq)).to(DEVICE)
            labels = torch.rand(args.rows * args.supervised).to(DEVICE)
            loss = loss_of(frozen, trained, ids, labels) / accumulation
            loss.backward()
            sum_of_losses = sum_of_losses + loss.detach()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(sum_of_losses))
        synchronize()
        seconds = time.perf_counter() - begun
        print(f"step {number + 1}: {1e3 * seconds:.1f} ms", file=sys.stderr, flush=True)
        if number >= args.warm_up:
            step_seconds.append(seconds)
    seconds = statistics.mean(step_seconds)
    tokens = args.rows * accumulation * args.seq
    flops = step_flops()
    figures = {
        "work": args.work,
        "by": "torch compiled" if args.compile else "torch eager",
        "version": torch.__version__,
        "device": args.device,
        "dtype": args.dtype,
        "tokens_per_step": tokens,
        "flops_per_step": float(flops),
        "seconds_per_step": seconds,
        "least_step_seconds": min(step_seconds),
        "most_step_seconds": max(step_seconds),
        "tokens_per_second": tokens / seconds,
        "mfu": flops / seconds / (args.peak_tflops * 1e12),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "reserved_bytes": torch.cuda.max_memory_reserved() if IS_CUDA else None,
    }
    print(json.dumps(figures))


main()
