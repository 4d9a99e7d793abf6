#!/usr/bin/env python3
"""Writes the model of a Hugging Face directory (BF16, F16 or F32; byte-level or SentencePiece BPE, if it has a tokenizer) as one GGUF file, for tests.

    tools/make_gguf.py MODEL_DIR OUT.gguf --type bf16|f32|f16|q8_0|q4_0 [--pre qwen2]

Matrices get the type that is asked for, norms and biases are F32, as other writers do. Q and K rows are put into the order of
interleaved RoPE where the architecture stores them so (llama). A small writer of its own: standard library only, so that a test
needs nothing else.
"""
import argparse
import json
import math
import pathlib
import struct

ALIGNMENT = 32
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
TOKEN_NORMAL, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER, TOKEN_UNUSED, TOKEN_BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def text(s):
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def u32(n):
    return struct.pack("<II", 4, n)


def f32(x):
    return struct.pack("<If", 6, x)


def boolean(b):
    return struct.pack("<IB", 7, b)


def string(s):
    return struct.pack("<I", 8) + text(s)


def strings(items):
    return struct.pack("<IIQ", 9, 8, len(items)) + b"".join(map(text, items))


def i32s(items):
    return struct.pack("<IIQ", 9, 5, len(items)) + struct.pack(f"<{len(items)}i", *items)


def f32s(items):
    return struct.pack("<IIQ", 9, 6, len(items)) + struct.pack(f"<{len(items)}f", *items)


def widen(bf16):
    """BF16 bytes as F32 bytes."""
    out = bytearray(2 * len(bf16))
    out[2::4], out[3::4] = bf16[0::2], bf16[1::2]
    return bytes(out)


def round_half_away(x):
    return int(x + 0.5) if x >= 0 else -int(-x + 0.5)


def f16(x):
    return struct.unpack("<e", struct.pack("<e", x))[0]


def q8_0(values):
    out = bytearray()
    for i in range(0, len(values), 32):
        block = values[i:i + 32]
        scale = max(map(abs, block)) / 127
        inverse = 1 / scale if scale else 0.0
        out += struct.pack("<e32b", scale, *[round_half_away(x * inverse) for x in block])
    return bytes(out)


def q4_0(values):
    out = bytearray()
    for i in range(0, len(values), 32):
        block = values[i:i + 32]
        scale = max(block, key=abs) / -8
        inverse = 1 / scale if scale else 0.0
        code = [min(15, int(x * inverse + 8.5)) for x in block]
        out += struct.pack("<e16B", scale, *[code[j] | code[j + 16] << 4 for j in range(16)])
    return bytes(out)


def stored(raw, dtype, kind):
    if dtype.lower() == kind:
        return raw
    assert kind != "bf16", f"{dtype} is not rounded to BF16 here"
    wide = widen(raw) if dtype == "BF16" else raw
    if dtype == "F16":
        wide = struct.pack(f"<{len(raw) // 2}f", *struct.unpack(f"<{len(raw) // 2}e", raw))
    if kind == "f32":
        return wide
    values = struct.unpack(f"<{len(wide) // 4}f", wide)
    if kind == "f16":
        return struct.pack(f"<{len(values)}e", *values)
    return q8_0(values) if kind == "q8_0" else q4_0(values)


def permuted(data, shape, heads):
    """Row j * d/2 + i of a head becomes row 2i + j."""
    rows, row_bytes = shape[0], len(data) // shape[0]
    d = rows // heads
    half = d // 2
    order = [h * d + j * half + i for h in range(heads) for i in range(half) for j in range(2)]
    return b"".join(data[r * row_bytes:(r + 1) * row_bytes] for r in order)


def gguf_name(name):
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER[stem]}.{kind}"


def tokenizer_pairs(config, tokenizer, pre):
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    tokens = [None] * config["vocab_size"]
    types = [TOKEN_NORMAL] * len(tokens)
    for token, i in model["vocab"].items():
        tokens[i] = token
    for a in added:
        tokens[a["id"]] = a["content"]
        types[a["id"]] = TOKEN_CONTROL if a["special"] else TOKEN_USER
    for i, token in enumerate(tokens):
        if token is None:
            tokens[i], types[i] = f"[PAD{i}]", TOKEN_UNUSED
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    starts = [p["SpecialToken"]["id"] for p in (tokenizer["post_processor"] or {"single": []})["single"] if "SpecialToken" in p]
    return {"tokenizer.ggml.model": string("gpt2"), "tokenizer.ggml.pre": string(pre), "tokenizer.ggml.tokens": strings(tokens),
            "tokenizer.ggml.token_type": i32s(types), "tokenizer.ggml.merges": strings(merges),
            "tokenizer.ggml.add_bos_token": boolean(bool(starts))}


def pieces_of_json(document):
    """[text, score, type] by id of a tokenizer.json of SentencePiece's kind, and whether it puts a space in front. A piece's score is minus
    the place of the first merge that makes it."""
    model = document["model"]
    pieces = [None] * len(model["vocab"])
    place = {}
    for i, merge in enumerate(model["merges"]):
        place.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), i)
    for token, i in model["vocab"].items():
        byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        # Characters come behind all merges, as they do in a trained model.
        pieces[i] = [token, 0.0 if byte else -float(place.get(token, len(place) + i)), TOKEN_BYTE if byte else TOKEN_NORMAL]
    for added in document["added_tokens"]:
        if added["id"] == len(pieces):
            pieces.append(None)
        kind = TOKEN_UNKNOWN if added["content"] == model["unk_token"] else TOKEN_CONTROL if added["special"] else TOKEN_USER
        pieces[added["id"]] = [added["content"], 0.0, kind]
    return pieces, "Prepend" in json.dumps(document["normalizer"])


def sentencepiece_pairs(pieces, prefix):
    return {"tokenizer.ggml.model": string("llama"), "tokenizer.ggml.pre": string("default"),
            "tokenizer.ggml.tokens": strings([p.replace(SPACE, " ") if kind == TOKEN_USER else p for p, _, kind in pieces]),
            "tokenizer.ggml.scores": f32s([s for _, s, _ in pieces]), "tokenizer.ggml.token_type": i32s([k for _, _, k in pieces]),
            "tokenizer.ggml.add_space_prefix": boolean(prefix)}


def rope(config):
    """Scaling parameters, theta among them, whichever spelling the config has."""
    return {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def llama3_factors(r, head_dim):
    factors, original = [], r["original_max_position_embeddings"]
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * r["rope_theta"] ** (2 * i / head_dim)
        smooth = (original / wavelength - r["low_freq_factor"]) / (r["high_freq_factor"] - r["low_freq_factor"])
        factors.append(r["factor"] if wavelength > original / r["low_freq_factor"] else 1.0 if wavelength < original / r["high_freq_factor"]
                       else 1 / ((1 - smooth) / r["factor"] + smooth))
    return struct.pack(f"<{len(factors)}f", *factors)


def head_dim_of(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def metadata(config, architecture):
    heads, r, d = config["num_attention_heads"], rope(config), head_dim_of(config)
    pairs = {"vocab_size": u32(config["vocab_size"]), "context_length": u32(config["max_position_embeddings"]),
             "embedding_length": u32(config["hidden_size"]), "block_count": u32(config["num_hidden_layers"]),
             "feed_forward_length": u32(config["intermediate_size"]), "attention.head_count": u32(heads),
             "attention.head_count_kv": u32(config.get("num_key_value_heads") or heads), "attention.key_length": u32(d),
             "attention.value_length": u32(d), "rope.dimension_count": u32(d), "rope.freq_base": f32(r["rope_theta"]),
             "attention.layer_norm_rms_epsilon": f32(config["rms_norm_eps"])}
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        pairs["attention.sliding_window"] = u32(config["sliding_window"])
    kind = r.get("rope_type", r.get("type", "default"))
    if kind in ("linear", "yarn"):
        pairs |= {"rope.scaling.type": string(kind), "rope.scaling.factor": f32(r["factor"])}
    if kind in ("yarn", "llama3"):
        pairs["rope.scaling.original_context_length"] = u32(r.get("original_max_position_embeddings") or config["max_position_embeddings"])
    if kind == "yarn":
        assert not {"attention_factor", "mscale", "mscale_all_dim"} & set(r), "GGUF has no key that means the same"
        for name, key in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")]:
            if r.get(name) is not None:
                pairs["rope.scaling." + key] = f32(r[name])
    eos = config["eos_token_id"]
    return {"general.architecture": string(architecture), "general.name": string("livequant test"), "general.alignment": u32(ALIGNMENT),
            **{f"{architecture}.{key}": value for key, value in pairs.items()},
            "tokenizer.ggml.bos_token_id": u32(config["bos_token_id"]),
            "tokenizer.ggml.eos_token_id": u32(eos[0] if isinstance(eos, list) else eos)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--type", choices=sorted(TYPES), required=True)
    parser.add_argument("--pre", default="qwen2", help="tokenizer.ggml.pre")
    parser.add_argument("--version", type=int, default=3)
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    raw = (args.model / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, body = json.loads(raw[8:8 + length]), raw[8 + length:]
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": kv_heads} if architecture == "llama" else {}
    tensors = {}  # name -> (type, shape, bytes)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] in ("BF16", "F16", "F32"), f"{name} is {entry['dtype']}; BF16, F16 and F32 are read"
        begin, end = entry["data_offsets"]
        values, shape = body[begin:end], entry["shape"]
        for part, count in heads.items():
            if f".{part}." in name:
                values = permuted(values, shape, count)
        kind = args.type if len(shape) == 2 else "f32"
        tensors[gguf_name(name)] = (kind, shape, stored(values, entry["dtype"], kind))
    if rope(config).get("rope_type", rope(config).get("type")) == "llama3":
        factors = llama3_factors(rope(config), head_dim_of(config))
        tensors["rope_freqs.weight"] = ("f32", [len(factors) // 4], factors)

    pairs = metadata(config, architecture)
    if (args.model / "tokenizer.json").exists():
        tokenizer = json.loads((args.model / "tokenizer.json").read_text())
        byte_level = "ByteLevel" in json.dumps(tokenizer["pre_tokenizer"])
        pairs |= tokenizer_pairs(config, tokenizer, args.pre) if byte_level else sentencepiece_pairs(*pieces_of_json(tokenizer))
    if (args.model / "chat_template.jinja").exists():
        pairs["tokenizer.chat_template"] = string((args.model / "chat_template.jinja").read_text())
    infos, data = b"", bytearray()
    for name, (kind, shape, values) in tensors.items():
        infos += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in reversed(shape))
        infos += struct.pack("<IQ", TYPES[kind], len(data))
        data += values + bytes(-len(values) % ALIGNMENT)
    head = b"GGUF" + struct.pack("<IQQ", args.version, len(tensors), len(pairs))
    head += b"".join(text(key) + value for key, value in pairs.items()) + infos
    args.out.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)


if __name__ == "__main__":
    main()
