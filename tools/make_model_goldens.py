#!/usr/bin/env python3
"""Makes tests/model/golden: small random-weight models and what transformers computes with them.

    python3 tools/make_model_goldens.py OUTPUT_FOLDER

Needs torch, transformers, safetensors and numpy; a CPU is enough. One folder a model:
    config.json        as save_pretrained writes it, its RoPE fields in the spelling that the model is there to test
    model.safetensors  every weight rounded to f16 or bf16; the model runs in f32 on exactly these values
    golden.json        prompt, logits at some positions and greedy tokens, computed twice: with keys and values as they
                       are ("f32") and rounded to f16 before attention ("f16"), as a cache of that dtype keeps them
A seed is taken when both runs choose the same greedy tokens and no choice had a margin below MARGIN.
"""

import importlib
import json
import os
import sys

import numpy
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

MARGIN = 1e-2
GREEDY = 24
VOCAB = 199

CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def model(name, kind="llama", *, heads, kv, d=None, layers=2, inter=48, hidden=64, tied=True, dtype="bfloat16",
          rope=None, theta=10000.0, spelling="rope_parameters", max_position=256, prompt=48, **fields):
    """One row of the table below. rope: rope_type and its parameters; None is the default type."""
    return dict(name=name, kind=kind, rope=rope, theta=theta, spelling=spelling, dtype=dtype, prompt=prompt,
                fields=dict(hidden_size=hidden, intermediate_size=inter, num_hidden_layers=layers,
                            num_attention_heads=heads, num_key_value_heads=kv, vocab_size=VOCAB,
                            max_position_embeddings=max_position, tie_word_embeddings=tied, bos_token_id=1,
                            eos_token_id=2, pad_token_id=None, **({} if d is None else {"head_dim": d}), **fields))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

MODELS = [
    # Biases everywhere.
    model("llama_bias", heads=2, kv=1, d=64, tied=False, attention_bias=True, mlp_bias=True, spelling="rope_scaling",
          dtype="float16"),
    # RoPE types, in both spellings; the scaled range is used (prompts beyond the original length).
    model("llama_rope_linear", heads=2, kv=1, d=32, rope={"rope_type": "linear", "factor": 4.0}, spelling="type",
          prompt=56),
    model("llama_rope_llama3", heads=2, kv=1, d=64, rope=LLAMA3, theta=500000.0, prompt=64),
    model("llama_rope_llama3_classic", heads=2, kv=1, d=32, rope=LLAMA3, theta=500000.0, spelling="rope_scaling",
          prompt=64, dtype="float16"),
    model("llama_rope_yarn", heads=2, kv=1, d=32, rope=YARN, max_position=128, prompt=72),
    model("llama_rope_yarn_attention", heads=2, kv=1, d=32, max_position=128, prompt=72, spelling="rope_scaling",
          rope={**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}),
    model("llama_rope_yarn_mscale", heads=2, kv=1, d=32, max_position=128, prompt=72,
          rope={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}),
    # Head sizes.
    model("llama_d80", heads=3, kv=1, d=80, layers=1, hidden=96),
    model("llama_d96", heads=2, kv=2, d=96, layers=1, dtype="float16"),
    model("llama_d100", heads=2, kv=1, d=100),
    model("llama_d112", heads=2, kv=1, d=112, layers=1, spelling="rope_scaling"),
    model("llama_d128", heads=2, kv=1, d=128),
    model("llama_d192", heads=2, kv=1, d=192, layers=1),
    model("llama_d256", heads=1, kv=1, d=256, layers=1),
    # Query heads a KV head: five over two KV heads, seven over one.
    model("llama_gqa5", heads=10, kv=2, d=16, hidden=80, dtype="float16"),
    model("llama_gqa7", heads=7, kv=1, d=16, hidden=84, tied=False),
    # Windows: shorter than the prompt, absent, and of some layers only.
    model("mistral_window", "mistral", heads=2, kv=1, d=32, tied=False, sliding_window=16, spelling="rope_scaling",
          prompt=80),
    model("mistral_full", "mistral", heads=2, kv=1, d=32, sliding_window=None, theta=1000000.0),
    model("qwen2_full", "qwen2", heads=2, kv=1, use_sliding_window=False, sliding_window=16, max_window_layers=1,
          spelling="rope_scaling", theta=1000000.0, dtype="float16"),
    model("qwen2_layers", "qwen2", heads=2, kv=1, layers=3, use_sliding_window=True, sliding_window=16,
          max_window_layers=1, prompt=80),
    model("qwen3", "qwen3", heads=2, kv=1, d=64, tied=False, spelling="rope_scaling", theta=1000000.0),
    model("qwen3_yarn", "qwen3", heads=2, kv=1, d=128, layers=1, rope=YARN, max_position=128, prompt=72,
          attention_bias=True),
]


def make_config(row):
    rope = row["rope"] or {"rope_type": "default"}
    if int(transformers.__version__.split(".")[0]) >= 5:
        spelled = {"rope_parameters": {"rope_theta": row["theta"], **rope}}
    else:
        spelled = {"rope_theta": row["theta"], "rope_scaling": row["rope"]}
    return CONFIGS[row["kind"]](**row["fields"], **spelled)


def respell(config, row):
    """The RoPE fields of a config.json as `spelling` says; nothing else changes but the weights' dtype."""
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        config.pop(key, None)
    if row["spelling"] == "rope_parameters":
        config["rope_parameters"] = {"rope_theta": row["theta"], **(row["rope"] or {"rope_type": "default"})}
    else:
        config["rope_theta"] = row["theta"]
        scaling = dict(row["rope"]) if row["rope"] else None
        if row["spelling"] == "type":
            scaling["type"] = scaling.pop("rope_type")
        config["rope_scaling"] = scaling
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = row["dtype"]
    return config


def fill(net, seed, dtype):
    """Random weights, rounded to the stored dtype: sharp attention, logits of standard deviation about 2."""
    generator = torch.Generator().manual_seed(seed)
    hidden = net.config.hidden_size
    with torch.no_grad():
        for name, parameter in sorted(net.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                value = 1.0 + 0.2 * noise
            elif name.endswith("bias"):
                value = 0.4 * noise
            elif "embed_tokens" in name or "lm_head" in name:
                value = noise * (2.0 / hidden ** 0.5)
            elif "q_proj" in name or "k_proj" in name:
                value = noise * (1.3 / parameter.shape[1] ** 0.5)
            else:
                value = noise * (1.0 / parameter.shape[1] ** 0.5)
            parameter.copy_(value.to(dtype).to(torch.float32))


class RoundedCache:
    """While open, attention reads keys and values rounded to f16."""

    def __init__(self, net):
        self.module = importlib.import_module(type(net).__module__)
        self.calls = 0

    def __enter__(self):
        self.original = self.module.eager_attention_forward

        def rounded(layer, query, key, value, *args, **kwargs):
            self.calls += 1
            return self.original(layer, query, key.half().float(), value.half().float(), *args, **kwargs)

        self.module.eager_attention_forward = rounded
        return self

    def __exit__(self, *_):
        self.module.eager_attention_forward = self.original
        assert self.calls > 0, "attention was not reached through eager_attention_forward"


def run(net, prompt):
    """(logits of every prompt position, greedy tokens, smallest margin). Every step is one whole forward."""
    ids = list(prompt)
    first, margin = None, float("inf")
    with torch.no_grad():
        for _ in range(GREEDY):
            logits = net(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().numpy()
            if first is None:
                first = logits
            best = numpy.sort(logits[-1])[-2:]
            margin = min(margin, float(best[1] - best[0]))
            ids.append(int(logits[-1].argmax()))
    return first, ids[len(prompt):], margin


def make(row, number, folder):
    dtype = getattr(torch, row["dtype"])
    net = AutoModelForCausalLM.from_config(make_config(row), attn_implementation="eager").to(torch.float32).eval()
    assert net.config._attn_implementation == "eager"
    for seed in range(1000 * number, 1000 * number + 300):
        fill(net, seed, dtype)
        prompt = numpy.random.default_rng(seed).integers(3, VOCAB, row["prompt"]).tolist()
        logits, greedy, margin = run(net, prompt)
        if margin < MARGIN or len(set(greedy)) < 4:
            continue
        with RoundedCache(net):
            logits16, greedy16, margin16 = run(net, prompt)
        if margin16 >= MARGIN and greedy16 == greedy:
            break
    else:
        sys.exit(f"{row['name']}: no seed has clear greedy choices")

    os.makedirs(folder, exist_ok=True)
    net.config.save_pretrained(folder)
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = respell(json.load(file), row)
    config["architectures"] = [type(net).__name__]  # as the model's own save_pretrained adds it
    with open(path, "w") as file:
        json.dump(config, file, indent=2, sort_keys=True)
        file.write("\n")

    tied = row["fields"]["tie_word_embeddings"]
    tensors = {name: value.to(dtype).contiguous().clone() for name, value in net.state_dict().items()
               if not (tied and name == "lm_head.weight") and not name.endswith("inv_freq")}
    for name, value in tensors.items():
        assert torch.equal(value.float(), net.state_dict()[name]), name
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})

    positions = [0, row["prompt"] // 2, row["prompt"] - 1]
    golden = {
        "transformers": transformers.__version__, "torch": torch.__version__, "seed": seed, "prompt": prompt,
        "positions": positions,
        "logits": {"f32": [[round(float(x), 5) for x in logits[p]] for p in positions],
                   "f16": [[round(float(x), 5) for x in logits16[p]] for p in positions]},
        "greedy": greedy, "margin": round(min(margin, margin16), 5),
    }
    with open(os.path.join(folder, "golden.json"), "w") as file:
        json.dump(golden, file, separators=(",", ":"))
        file.write("\n")
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    layer_types = getattr(net.config, "layer_types", None)
    print(f"{row['name']}: seed {seed}, std {logits.std():.2f}, margin {golden['margin']}, "
          f"f16 off by {abs(logits16 - logits).max():.1e}, {len(set(greedy))} distinct of {GREEDY}, {size} bytes, "
          f"layer_types {layer_types}", flush=True)
    return size, golden["margin"]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(4)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    results = [make(row, number, os.path.join(sys.argv[1], row["name"])) for number, row in enumerate(MODELS, start=1)]
    print(f"{len(results)} models, {sum(size for size, _ in results)} bytes, smallest margin "
          f"{min(margin for _, margin in results)}")


if __name__ == "__main__":
    main()
