#!/usr/bin/env python3
"""Writes the model of a Hugging Face directory (LlamaForCausalLM, BF16, byte-level BPE) as one GGUF file, for tests.

    tools/make_gguf.py MODEL_DIR OUT.gguf --type bf16|f32|f16|q8_0|q4_0 [--pre qwen2]

Matrices get the type that is asked for, norms are F32, as other writers do. Q and K rows are put into the order of interleaved
RoPE, which architecture "llama" stores. A small writer of its own: standard library only, so that a test needs nothing else.
"""
import argparse
import json
import pathlib
import struct

ALIGNMENT = 32
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
TOKEN_NORMAL, TOKEN_CONTROL, TOKEN_USER = 1, 3, 4
LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
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


def stored(bf16, kind):
    if kind == "bf16":
        return bf16
    wide = widen(bf16)
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


def metadata(config, tokenizer, pre):
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
            tokens[i], types[i] = f"[PAD{i}]", 5
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    starts = [p["SpecialToken"]["id"] for p in (tokenizer["post_processor"] or {"single": []})["single"] if "SpecialToken" in p]
    return {
        "general.architecture": string("llama"), "general.name": string(config.get("_name", "livequant test")),
        "general.alignment": u32(ALIGNMENT), "llama.vocab_size": u32(config["vocab_size"]),
        "llama.context_length": u32(config["max_position_embeddings"]), "llama.embedding_length": u32(config["hidden_size"]),
        "llama.block_count": u32(config["num_hidden_layers"]), "llama.feed_forward_length": u32(config["intermediate_size"]),
        "llama.attention.head_count": u32(config["num_attention_heads"]),
        "llama.attention.head_count_kv": u32(config["num_key_value_heads"]),
        "llama.attention.key_length": u32(config["head_dim"]), "llama.attention.value_length": u32(config["head_dim"]),
        "llama.rope.dimension_count": u32(config["head_dim"]), "llama.rope.freq_base": f32(config["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": f32(config["rms_norm_eps"]),
        "tokenizer.ggml.model": string("gpt2"), "tokenizer.ggml.pre": string(pre), "tokenizer.ggml.tokens": strings(tokens),
        "tokenizer.ggml.token_type": i32s(types), "tokenizer.ggml.merges": strings(merges),
        "tokenizer.ggml.bos_token_id": u32(config["bos_token_id"]), "tokenizer.ggml.eos_token_id": u32(config["eos_token_id"]),
        "tokenizer.ggml.add_bos_token": boolean(bool(starts)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--type", choices=sorted(TYPES), required=True)
    parser.add_argument("--pre", default="qwen2", help="tokenizer.ggml.pre")
    parser.add_argument("--version", type=int, default=3)
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    tokenizer = json.loads((args.model / "tokenizer.json").read_text())
    raw = (args.model / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, body = json.loads(raw[8:8 + length]), raw[8 + length:]
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    infos, data = b"", bytearray()
    names = [n for n in header if n != "__metadata__"]
    for name in names:
        entry = header[name]
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}; BF16 is read"
        begin, end = entry["data_offsets"]
        values, shape = body[begin:end], entry["shape"]
        for part, count in heads.items():
            if f".{part}.weight" in name:
                values = permuted(values, shape, count)
        kind = args.type if len(shape) == 2 else "f32"
        infos += text(gguf_name(name)) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in reversed(shape))
        infos += struct.pack("<IQ", TYPES[kind], len(data))
        data += stored(values, kind)
        data += bytes(-len(data) % ALIGNMENT)
    pairs = metadata(config, tokenizer, args.pre)
    head = b"GGUF" + struct.pack("<IQQ", args.version, len(names), len(pairs))
    head += b"".join(text(key) + value for key, value in pairs.items()) + infos
    args.out.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)


if __name__ == "__main__":
    main()
