"""Engines of vLLM on the CPU that follow a trainer, and others that load what they should have then.

    python tests/helpers/vllm_program.py FOLDER

writes FOLDER/<kind>-followed.json and FOLDER/<kind>-reloaded.json: token ids and log probabilities.

    python tests/helpers/vllm_program.py FOLDER say

prints how a model that is saved in FOLDER continues the prompt 2.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

import shrinkpoint.sync.vllm as engine_module
from shrinkpoint.sync import Publisher
from shrinkpoint.sync.vllm_layout import plan_layers

KINDS = ("base", "tied", "int8", "unstaged", "whole")
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def build(kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=kind == "tied"))


def published(model, kind):
    """The tensors in bfloat16; of linear layers, 8-bit integers and a scale for each row."""
    tensors = {name: tensor.detach().bfloat16() for name, tensor in model.state_dict().items()}
    if kind == "tied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if kind in ("int8", "unstaged"):
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            values = tensors[name].float()
            scale = values.abs().amax(1, keepdim=True) / 127
            tensors[name] = (values / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale.bfloat16()
    return tensors


def save(model, kind, folder):
    model.config.save_pretrained(folder)
    tensors = published(model, kind)
    if kind == "tied":
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    config |= {"quantization_config": INT8} if kind in ("int8", "unstaged") else {}
    (folder / "config.json").write_text(json.dumps(config))


def open_engine(folder):
    options = {"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 64, "enable_prefix_caching": False}
    options |= {"skip_tokenizer_init": True, "weight_transfer_config": {"backend": "shrinkpoint"}}
    return LLM(str(folder), **options)


def say(llm, prompts=((5, 6, 7, 0), (5, 6, 7, 1), (5, 6, 7, 2))):
    """What prompts are continued with, each token with the logarithms of its likeliest tokens' probabilities."""
    prompts = [{"prompt_token_ids": [*prompt]} for prompt in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True, detokenize=False)
    outputs = [answer.outputs[0] for answer in llm.generate(prompts, sampling, use_tqdm=False)]
    return [
        [list(output.token_ids), [sorted((token, x.logprob) for token, x in row.items()) for row in output.logprobs]]
        for output in outputs
    ]


def update(llm, version):
    llm.start_weight_update()
    time.sleep(0.2)
    llm.update_weights({"update_info": {"version": version}})
    llm.finish_weight_update(str(version))


def plan_unstaged(model, tensors):
    plans = plan_layers(model, tensors)
    for plan in plans:
        plan.is_staged = False
    return plans


def follow(kind, folder):
    if kind == "whole":  # as of a model that does more than to copy tensors
        engine_module.plan_layers = lambda model, tensors: None
    if kind == "unstaged":  # as of layers whose kernels share what they derive
        engine_module.plan_layers = plan_unstaged
    model = build(kind)
    save(model, kind, folder / f"{kind}-first")
    llm = open_engine(folder / f"{kind}-first")
    optimizer, said = torch.optim.AdamW(model.parameters(), lr=1e-3), [say(llm)]
    publisher = Publisher(folder / f"{kind}-place", threads=1)
    llm.init_weight_transfer_engine({"init_info": {"where": str(folder / f"{kind}-place"), "threads": 1}})
    for step in range(4):
        if step == 3:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("q_proj" in name or "embed" in name)
        tokens = torch.randint(0, 512, (4, 32))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        publisher.publish(published(model, kind))
        if step != 1:  # the server falls behind
            update(llm, step)
            said.append(say(llm))
    save(model, kind, folder / f"{kind}-last")
    return {"said": said, "refused": refuse(llm, publisher, kind, model), "version": llm.get_weight_version()}


def refuse(llm, publisher, kind, model):
    """Errors of updates with a tensor too many and of a damaged file, and what the engine says after them."""
    errors = []
    for step, more in enumerate(({"more.weight": torch.zeros(4)}, {})):
        version = publisher.publish(published(model, kind) | more, keyframe=bool(step)).version
        if step:
            for path in sorted(Path(publisher._storage.describe()).glob(f"version-{version:012d}*")):
                path.write_bytes(path.read_bytes()[:-1] + b"~")
        try:
            update(llm, version)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return [errors, say(llm)]


def in_child(name, folder, function, *arguments):
    if (child := os.fork()) == 0:
        try:
            (folder / f"{name}.json").write_text(json.dumps(function(*arguments)))
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} failed")


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    if sys.argv[2:] == ["say"]:
        print(json.dumps(say(open_engine(FOLDER), [[2]])[0]))
        sys.exit()
    for kind in sys.argv[2:] or KINDS:
        in_child(f"{kind}-followed", FOLDER, follow, kind, FOLDER)
        in_child(f"{kind}-reloaded", FOLDER, lambda kind=kind: say(open_engine(FOLDER / f"{kind}-last")))
        shutil.rmtree(FOLDER / f"{kind}-place")
