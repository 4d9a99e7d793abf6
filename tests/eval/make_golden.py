#!/usr/bin/env python3
"""Golden perplexities of a prefix of the held-out books, in double precision, by another language than the project's.

    make_golden.py [--model models/books-7m]

It needs numpy and regex (Debian: python3-numpy, python3-regex); prints what perplexity_test.cc holds

The formulas are those of training/model.py; nothing is shared with src/.
"""
import argparse
import json
import os
import struct

import numpy as np
import regex


def encode(path, text):
    """Byte-level BPE: the pattern cuts words, then the earliest merge of a word is done until none is left."""
    with open(path, encoding="utf-8") as f:
        spec = json.load(f)
    vocab = spec["model"]["vocab"]
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in spec["model"]["merges"]]
    rank = {m: i for i, m in enumerate(merges)}
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    shown = {b: chr(b) for b in plain}
    shown.update({b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in shown)})
    pattern = next(p["pattern"]["Regex"] for p in spec["pre_tokenizer"]["pretokenizers"] if p["type"] == "Split")
    ids = []
    for word in regex.findall(pattern, text):
        parts = [shown[b] for b in word.encode()]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: rank.get((parts[i], parts[i + 1]), 1 << 30))
            if (parts[best], parts[best + 1]) not in rank:
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        ids += [vocab[p] for p in parts]
    return ids


def read_weights(path):
    with open(path, "rb") as f:
        raw = f.read()
    n = struct.unpack("<Q", raw[:8])[0]
    out = {}
    for name, t in json.loads(raw[8:8 + n]).items():
        if name == "__metadata__":
            continue
        assert t["dtype"] == "BF16"
        a, b = t["data_offsets"]
        bits = np.frombuffer(raw[8 + n + a:8 + n + b], np.uint16).astype(np.uint32) << 16
        out[name] = bits.view(np.float32).astype(np.float64).reshape(t["shape"])
    return out


def norm(x, g, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * g


def log_probs(w, c, ids):
    n, d, nh, nkv = len(ids), c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    inv = c["rope_theta"] ** (-np.arange(0, d, 2) / d)
    ang = np.outer(np.arange(n), inv)
    cos, sin = np.cos(ang)[:, None], np.sin(ang)[:, None]

    def rope(x):
        a, b = x[..., :d // 2], x[..., d // 2:]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    x = w["model.embed_tokens.weight"][ids]
    mask = np.triu(np.full((n, n), -np.inf), 1)
    for layer in range(c["num_hidden_layers"]):
        p = "model.layers.%d." % layer
        h = norm(x, w[p + "input_layernorm.weight"], c["rms_norm_eps"])
        q, k, v = ((h @ w[p + "self_attn.%s_proj.weight" % s].T).reshape(n, -1, d) for s in "qkv")
        q, k = rope(q), rope(k)
        o = np.empty((n, nh, d))
        for head in range(nh):
            s = q[:, head] @ k[:, head // (nh // nkv)].T / np.sqrt(d) + mask
            s = np.exp(s - s.max(-1, keepdims=True))
            o[:, head] = s / s.sum(-1, keepdims=True) @ v[:, head // (nh // nkv)]
        x = x + o.reshape(n, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"], c["rms_norm_eps"])
        g = h @ w[p + "mlp.gate_proj.weight"].T
        x = x + (g / (1 + np.exp(-g)) * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    lg = norm(x, w["model.norm.weight"], c["rms_norm_eps"]) @ w["model.embed_tokens.weight"].T
    m = lg.max(-1, keepdims=True)
    return lg - m - np.log(np.exp(lg - m).sum(-1, keepdims=True))


def windows(w, c, ids, context):
    body, total = context - 1, 0.0
    for at in range(0, len(ids), body):
        y = ids[at:at + body]
        total -= log_probs(w, c, [c["bos_token_id"]] + y[:-1])[np.arange(len(y)), y].sum()
    return total / len(ids), len(ids)


def llama_cpp(w, c, ids, context):
    ids, total, count = [c["bos_token_id"]] + ids, 0.0, 0
    for at in range(0, len(ids) - context + 1, context):
        x = [c["bos_token_id"]] + ids[at + 1:at + context]
        rows = np.arange(context // 2, context - 1)
        total -= log_probs(w, c, x)[rows, np.array(x)[rows + 1]].sum()
        count += len(rows)
    return total / count, count


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--model", default=os.path.join(os.path.dirname(__file__), "..", "..", "models", "books-7m"))
    a = ap.parse_args()
    with open(os.path.join(a.model, "config.json")) as f:
        c = json.load(f)
    w = read_weights(os.path.join(a.model, "model.safetensors"))
    with open(os.path.join(a.model, "eval", "heldout_books.txt"), encoding="utf-8") as f:
        ids = encode(os.path.join(a.model, "tokenizer.json"), f.read(20000))
    for method, context, tokens in ((windows, 512, 1500), (windows, 2048, 2047), (llama_cpp, 256, 1100)):
        nll, n = method(w, c, ids[:tokens], context)
        print("%s context %d, first %d tokens: nll %.9f perplexity %.6f scored %d" %
              (method.__name__, context, tokens, nll, np.exp(nll), n))


if __name__ == "__main__":
    main()
