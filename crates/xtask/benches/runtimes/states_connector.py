"""Lets vLLM for the CPU store hidden states. Its own connector copies them on a CUDA stream.

Named by `kv_connector_module_path` of `--kv-transfer-config`, with the directory of this file on PYTHONPATH. STATES_FAULT plants a
fault in the states after middle layers: `shifted` by one token, or `swapped`.
"""

from __future__ import annotations

import os

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Copied:
    """Takes the place of a CUDA event after a copy that is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending) -> None:
        size = self._block_size
        slots = torch.cat([torch.arange(block * size, (block + 1) * size) for block in pending.block_ids])
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        match os.environ.get("STATES_FAULT"):
            case "shifted":
                states[:, :-1] = states[:, :-1].roll(1, 0)
            case "swapped":
                states = states[:, [0, 2, 1, *range(3, states.shape[1])]].contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        self._req_copy_events[pending.req_id] = Copied()
        lock = self._lock_fds.pop(pending.req_id)
        future = self._executor.submit(self._write_tensors, tensors, Copied(), pending.filename, lock)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))
