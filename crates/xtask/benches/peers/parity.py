"""A head or an adapter, trained by torch on what draftsmith's trainer sees: the same rows in the same
batches and order, the same mixtures, first weights, optimiser and schedule. One JSON document on
stdout: every step's loss, every epoch's validation, tokens and seconds."""

import json
import sys
import time
from pathlib import Path

import torch
from common import arguments, best_threads, load, pad, read_settings
from modules import Adapter, Head, adam_w, head_loss, load_weights
from torch import nn
from transformers import get_cosine_schedule_with_warmup

args = arguments(what="head", model="", curriculum="", first="", settings="{}", exit_layer=2)
SETTINGS = read_settings(args.settings)
epochs, validation = [], []
with open(args.curriculum) as file:
    for line in file:
        lesson = json.loads(line)
        if lesson["epoch"] == 0:
            validation.extend(lesson["batches"])
        else:
            while len(epochs) < lesson["epoch"]:
                epochs.append([])
            epochs[-1].append(lesson["batches"])
model = load(Path(args.model))


def features_of(batch, hidden):
    """The hidden states `[rows, seq, hidden]` at the batch's positions."""
    return torch.cat([hidden[row, example["positions"]] for row, example in enumerate(batch)])


class HeadTwin:
    def __init__(self):
        self.module = Head(model.config.hidden_size, SETTINGS["num_layers"])

    def batch(self, batch):
        with torch.no_grad():
            ids = pad([example["input_ids"] for example in batch])
            hidden = model.model(ids, use_cache=False).last_hidden_state
        labels = torch.tensor([label for example in batch for label in example["labels"]])
        return features_of(batch, hidden), labels

    def loss(self, batch):
        features, labels = self.batch(batch)
        return head_loss(self.module, features, labels, SETTINGS["rejection_weight"]), len(labels)

    @staticmethod
    def share(batch, step):
        """A batch's weight in its step."""
        return 1 / len(step)

    def validate(self):
        """The mean binary KL divergence of labels from predictions, in nats."""
        total, count = 0.0, 0
        for batch in validation:
            features, labels = self.batch(batch)
            logits = self.module(features).double()
            accept = (logits[:, 1] - logits[:, 0]).sigmoid()
            y = labels.double()
            for p, q in ((y, accept), (1 - y, 1 - accept)):
                total += torch.where(p > 0, p * (p / q).log(), 0.0).sum().item()
            count += len(labels)
        return total / count


class AdapterTwin:
    def __init__(self):
        self.module = Adapter(model.config)

    def batch(self, batch):
        with torch.no_grad():
            ids = pad([example["input_ids"] for example in batch])
            states = model.model(ids, use_cache=False, output_hidden_states=True).hidden_states
            probs = model.lm_head(features_of(batch, states[-1])).softmax(-1)
        adapted = self.module(states[args.exit_layer])
        return model.lm_head(features_of(batch, adapted)), probs

    def loss(self, batch):
        logits, probs = self.batch(batch)
        return nn.functional.cross_entropy(logits, probs), len(probs)

    @staticmethod
    def share(batch, step):
        tokens = [sum(len(example["positions"]) for example in each) for each in step]
        return sum(len(example["positions"]) for example in batch) / sum(tokens)

    def validate(self):
        """The mean cross-entropy, in nats."""
        total, count = 0.0, 0
        for batch in validation:
            logits, probs = self.batch(batch)
            loss = nn.functional.cross_entropy(logits, probs, reduction="sum")
            total, count = total + loss.item(), count + len(probs)
        return total / count


def train(twin, epochs, most_steps=None):
    """Runs all steps in order. Returns their losses, the validation after each epoch, tokens and seconds."""
    load_weights(twin.module, args.first)
    settings = SETTINGS
    optimizer = adam_w(twin.module, settings)
    num_steps = sum(map(len, epochs))
    schedule = get_cosine_schedule_with_warmup(optimizer, settings["num_warmup_steps"], num_steps)
    losses, scores, num_tokens, start = [], [], 0, time.perf_counter()
    for steps in epochs:
        for step in steps[:most_steps]:
            total = 0.0
            for batch in step:
                loss, count = twin.loss(batch)
                (loss * twin.share(batch, step)).backward()
                total, num_tokens = total + loss.item(), num_tokens + count
            nn.utils.clip_grad_norm_(twin.module.parameters(), settings["max_grad_norm"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(total / len(step))
        if most_steps is None:
            with torch.no_grad():
                scores.append(twin.validate())
    seconds = time.perf_counter() - start
    return {"losses": losses, "validation": scores, "num_tokens": num_tokens, "seconds": seconds}


twin = {"head": HeadTwin, "adapter": AdapterTwin}[args.what]()
num_threads = best_threads(lambda: train(twin, epochs[:1], 8))
done = train(twin, epochs)
json.dump({"num_threads": num_threads, "torch": torch.__version__, **done}, sys.stdout)
