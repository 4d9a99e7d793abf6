#!/usr/bin/env python3
"""Writes corpora of the fuzz targets gguf, index, loader and safetensors: small files, good and bad in one way each.

    tools/make_file_corpus.py [fuzz/corpus]
"""
import json
import pathlib
import random
import struct
import sys

ROOT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "fuzz/corpus")
# A Llama of one layer: 2 channels, 1 head of 2, 3 tokens.
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 3, "hidden_size": 2,
          "intermediate_size": 2, "max_position_embeddings": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
          "head_dim": 2, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True}
SHAPES = {"model.embed_tokens.weight": [3, 2], "model.norm.weight": [2]}
for part in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]:
    SHAPES[f"model.layers.0.{part}.weight"] = [2, 2]
for part in ["input_layernorm", "post_attention_layernorm"]:
    SHAPES[f"model.layers.0.{part}.weight"] = [2]
GGUF_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
for a, b in [("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
             ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"),
             ("post_attention_layernorm", "ffn_norm")]:
    GGUF_NAMES[f"model.layers.0.{a}.weight"] = f"blk.0.{b}.weight"


def save(target, name, data):
    (ROOT / target).mkdir(parents=True, exist_ok=True)
    (ROOT / target / name).write_bytes(data)


def count(shape):
    n = 1
    for d in shape:
        n *= d
    return n


def numbers(n, kind="f"):
    rng = random.Random(n)
    return struct.pack(f"<{n}{kind}", *[rng.uniform(-1, 1) for _ in range(n)])


def safetensors(tensors):
    """name -> (dtype, shape, bytes): header text and data."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return json.dumps(header, separators=(",", ":")).encode(), data


def directory(config, tensors):
    return b"d" + json.dumps(config, separators=(",", ":")).encode() + b"\0" + b"\0".join(safetensors(tensors))


# ---- gguf ----

def text(s):
    raw = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(kind, fmt, value):
    return struct.pack("<I" + fmt, kind, value)


def u32(n):
    return typed(4, "I", n)


def f32(x):
    return typed(6, "f", x)


def string(s):
    return struct.pack("<I", 8) + text(s)


def array(element, items):
    return struct.pack("<IIQ", 9, element, len(items)) + b"".join(items)


def gguf(pairs, tensors, version=3, alignment=32):
    """tensors: name -> (type, dims innermost first, bytes)."""
    infos, data = b"", b""
    for name, (kind, dims, raw) in tensors.items():
        data += bytes(-len(data) % alignment)
        infos += text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims)
        infos += struct.pack("<IQ", kind, len(data))
        data += raw
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(text(k) + v for k, v in pairs.items()) + infos
    return head + (bytes(-len(head) % alignment) if tensors else b"") + data


def model_pairs(architecture="llama", embedding=2):
    a = architecture
    return {"general.architecture": string(a), f"{a}.context_length": u32(16), f"{a}.embedding_length": u32(embedding),
            f"{a}.block_count": u32(1), f"{a}.feed_forward_length": u32(embedding), f"{a}.attention.head_count": u32(1),
            f"{a}.rope.freq_base": f32(10000), f"{a}.attention.layer_norm_rms_epsilon": f32(1e-5), "tokenizer.ggml.eos_token_id": u32(1)}


def model_tensors(kind=0, width=2):
    out = {}
    for name, shape in SHAPES.items():
        shape = [width if d == 2 else d for d in shape]
        n = count(shape)
        if len(shape) == 1 or kind == 0:
            out[GGUF_NAMES[name]] = (0, shape[::-1], numbers(n))
        elif kind == 1:
            out[GGUF_NAMES[name]] = (1, shape[::-1], numbers(n, "e"))
        elif kind == 30:
            out[GGUF_NAMES[name]] = (30, shape[::-1], b"\x80\x3f" * n)
        else:
            block = struct.pack("<e", 0.01) + bytes(i * 7 % 256 for i in range(32 if kind == 8 else 16))
            out[GGUF_NAMES[name]] = (kind, shape[::-1], block * (n // 32))
    return out


def sentencepiece_pairs(pieces=(), byte_tokens=True, **more):
    """tokenizer.ggml.* of a small SentencePiece model; pieces are (text, score, type) behind the usual ones. None leaves a key out."""
    every = [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3)] + [(f"<0x{b:02X}>", 0, 6) for b in range(256 if byte_tokens else 0)]
    every += [("\u2581", -9, 1), ("a", -9, 1), ("b", -9, 1), ("I", -9, 1), ("t", -9, 1), ("4", -9, 1), ("ab", -1, 1), ("\u2581ab", -2, 1), ("abab", -2, 1), *pieces]
    pairs = {"model": string("llama"), "tokens": array(8, [text(t) for t, _, _ in every]), "scores": array(6, [struct.pack("<f", x) for _, x, _ in every]),
             "token_type": array(5, [struct.pack("<i", k) for _, _, k in every]), "bos_token_id": u32(1), "eos_token_id": u32(2), **more}
    return {"tokenizer.ggml." + key: value for key, value in pairs.items() if value is not None}


def tokenizer_pairs(pre="gpt-2", **more):
    alphabet = [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"]
    tokens = ["<s>", "</s>"] + alphabet + ["It"]
    pairs = {"tokenizer.ggml.model": string("gpt2"), "tokenizer.ggml.pre": string(pre), "tokenizer.ggml.tokens": array(8, [text(t) for t in tokens]),
             "tokenizer.ggml.token_type": array(5, [struct.pack("<i", 3 if i < 2 else 1) for i in range(len(tokens))]),
             "tokenizer.ggml.merges": array(8, [text("I t")]), "tokenizer.ggml.bos_token_id": u32(0), "tokenizer.ggml.eos_token_id": u32(1),
             "tokenizer.ggml.add_bos_token": typed(7, "B", 1), "tokenizer.ggml.add_eos_token": typed(7, "B", 1)}
    pairs.update({"tokenizer.ggml." + k: v for k, v in more.items()})
    return pairs


def gguf_corpus():
    every = {f"n{i}": typed(i, f, v) for i, (f, v) in {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -3), 4: ("I", 1), 5: ("i", -1),
                                                       6: ("f", 0.5), 7: ("B", 1), 10: ("Q", 1 << 63), 11: ("q", -1), 12: ("d", 1e300)}.items()}
    every |= {"s": string(b"a\0b\xff"), "strings": array(8, [text("x"), text("")]), "bools": array(7, [b"\0", b"\1"]),
              "nested": array(9, [struct.pack("<IQ", 0, 2) + b"\5\6", struct.pack("<IQ", 8, 1) + text("q")])}
    cases = {"every_value": gguf(every, {}), "no_pairs": gguf({}, {}), "model": gguf(model_pairs(), model_tensors())}
    cases["version_2"] = gguf(model_pairs(), model_tensors(), version=2)
    cases["version_1"] = gguf(model_pairs(), {}, version=1)
    cases["big_endian"] = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    cases["aligned_8"] = gguf({**model_pairs(), "general.alignment": u32(8)}, model_tensors(), alignment=8)
    for kind, name in [(1, "f16"), (30, "bf16")]:
        cases[name] = gguf(model_pairs(), model_tensors(kind))
    for kind, name in [(8, "q8_0"), (2, "q4_0")]:
        cases[name] = gguf({**model_pairs(embedding=32)}, model_tensors(kind, 32))
    cases["q6_k"] = gguf({}, {"a": (14, [256], bytes(210))})
    cases["split"] = gguf({"split.count": typed(2, "H", 2)}, {})
    cases["cut"] = cases["model"][:-5]
    cases["behind"] = cases["model"] + bytes(64)
    cases["dims"] = gguf({}, {"a": (0, [1, 1, 1, 1, 1], bytes(4))})
    cases["zero"] = gguf({}, {"a": (0, [0], b"")})
    cases["wrap"] = gguf({}, {"a": (0, [1 << 33, 1 << 33], b"")})
    cases["repeated"] = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("a") + u32(1))
    cases["deep"] = gguf({"a": struct.pack("<I", 9) + 6 * struct.pack("<IQ", 9, 1)}, {})
    for arch in ["qwen2", "qwen3", "mistral", "mamba"]:
        cases[arch] = gguf(model_pairs(arch), model_tensors())
    cases["window"] = gguf({**model_pairs(), "llama.attention.sliding_window": u32(4)}, model_tensors())
    cases["layers"] = gguf({**model_pairs(), "llama.attention.head_count_kv": array(5, [struct.pack("<i", 1)] * 2),
                            "llama.attention.key_length": u32(2), "llama.attention.value_length": u32(2), "llama.rope.dimension_count": u32(2),
                            "llama.vocab_size": u32(3)}, model_tensors())
    cases["signed_heads"] = gguf({**model_pairs(), "llama.attention.head_count": typed(5, "i", 1)}, model_tensors())
    for name, more in [("linear", {"type": string("linear"), "factor": f32(2)}),
                       ("yarn", {"type": string("yarn"), "factor": f32(2), "original_context_length": u32(8), "yarn_beta_fast": f32(32)}),
                       ("longrope", {"type": string("longrope")}), ("unscaled", {"factor": f32(2)})]:
        cases["rope_" + name] = gguf({**model_pairs(), **{"llama.rope.scaling." + k: v for k, v in more.items()}}, model_tensors())
    cases["rope_factors"] = gguf(model_pairs(), {**model_tensors(), "rope_freqs.weight": (0, [1], struct.pack("<f", 1))})
    cases["rope_factors_wrong"] = gguf(model_pairs(), {**model_tensors(), "rope_freqs.weight": (0, [1], struct.pack("<f", 3))})
    cases["unknown_key"] = gguf({**model_pairs(), "llama.logit_scale": f32(2)}, model_tensors())
    cases["bias"] = gguf(model_pairs(), {**model_tensors(), "blk.0.attn_q.bias": (0, [2], bytes(8)), "output.weight": (0, [2, 3], bytes(24))})
    for pre in ["gpt-2", "llama-bpe", "qwen2", "tekken"]:
        cases["tokenizer_" + pre] = gguf(tokenizer_pairs(pre), {})
    cases["tokenizer_spm"] = gguf(tokenizer_pairs(model=string("llama")), {})
    boolean = lambda b: typed(7, "B", b)
    for name, pairs in {"good": sentencepiece_pairs(), "no_bytes": sentencepiece_pairs(byte_tokens=False), "no_prefix": sentencepiece_pairs(add_space_prefix=boolean(0)),
                        "user": sentencepiece_pairs([("  ", 0, 4), ("<tool>", 0, 4)]), "two_ways": sentencepiece_pairs([("  ", 0, 4), ("\u2581\u2581", 0, 4)]),
                        "long_user": sentencepiece_pairs([(" " * 200, 0, 4)]), "unused": sentencepiece_pairs([("ba", 0, 5), ("42", 0, 5)]),
                        "halves": sentencepiece_pairs([("2\n", 0, 1)], byte_tokens=False), "halves_bytes": sentencepiece_pairs([("2\n", 0, 1), ("\u00e9 ", 0, 1)]),
                        "pre": sentencepiece_pairs(pre=string("default")), "bad_pre": sentencepiece_pairs(pre=string("gpt-2")), "flag": sentencepiece_pairs(add_space_prefix=u32(1)),
                        "charsmap": sentencepiece_pairs(precompiled_charsmap=array(0, [b"x"])), "whitespaces": sentencepiece_pairs(remove_extra_whitespaces=boolean(1)),
                        "escape": sentencepiece_pairs(escape_whitespaces=boolean(0)), "no_scores": sentencepiece_pairs(scores=None), "nan": sentencepiece_pairs([("q", float("nan"), 1)]),
                        "type": sentencepiece_pairs([("q", 0, 7)]), "long": sentencepiece_pairs([("q" * 300, 0, 1)]), "twice": sentencepiece_pairs([("ab", 0, 1)]),
                        "byte_name": sentencepiece_pairs([("q", 0, 6)]), "byte_twice": sentencepiece_pairs([("<0xAA>", 0, 1)]), "some_bytes": sentencepiece_pairs([("<0x41>", 0, 6)], byte_tokens=False),
                        "no_unk": sentencepiece_pairs(byte_tokens=False, unknown_token_id=u32(999)), "unk_twice": sentencepiece_pairs([("q", 0, 2)]), "unk_id": sentencepiece_pairs([("q", 0, 2)], unknown_token_id=u32(0)),
                        "unk_no_id": sentencepiece_pairs(unknown_token_id=string("x")), "no_bos": sentencepiece_pairs(bos_token_id=None), "eos": sentencepiece_pairs(add_eos_token=boolean(1)),
                        "across": sentencepiece_pairs([("b\u2581", -3, 1)]), "empty": sentencepiece_pairs([("", 0, 1)]), "not_utf8": sentencepiece_pairs(tokens=array(8, [text(b"\xff")]))}.items():
        cases["sentencepiece_" + name] = gguf(pairs, {})
    cases["tokenizer_types"] = gguf(tokenizer_pairs(token_type=array(5, [struct.pack("<i", 4 if i == 5 else 5 if i == 9 else 1) for i in range(99)])), {})
    cases["tokenizer_twice"] = gguf(tokenizer_pairs(tokens=array(8, [text("a")] * 99)), {})
    cases["tokenizer_bos"] = gguf(tokenizer_pairs(bos_token_id=u32(99)), {})
    cases["tokenizer_bytes"] = gguf(tokenizer_pairs(merges=array(8, [text(b"\xff \xfe")])), {})
    for kind in [0, 1, 2, 3, 4, 10, 11]:
        one = struct.pack("<" + "BbHhIifBsaQqd"[kind], 1) if kind < 8 or kind > 9 else b""
        cases[f"heads_{kind}"] = gguf({**model_pairs(), "llama.attention.head_count_kv": array(kind, [one] * 2)}, model_tensors())
    cases["heads_float"] = gguf({**model_pairs(), "llama.attention.head_count_kv": f32(1)}, model_tensors())
    cases["magic"] = b"GGML" + cases["model"][4:]
    cases["value_type"] = gguf({"a": struct.pack("<I", 13)}, {})
    cases["bool_2"] = gguf({"a": typed(7, "B", 2)}, {})
    cases["array_long"] = gguf({"a": struct.pack("<IIQ", 9, 10, 1 << 61)}, {})
    cases["tensor_type"] = gguf({}, {"a": (77, [1], bytes(4))})
    cases["tensor_name"] = gguf({}, {"": (0, [1], bytes(4))})
    cases["block_part"] = gguf({}, {"a": (8, [33], bytes(68))})
    cases["pairs"] = b"GGUF" + struct.pack("<IQQ", 3, 0, 1000) + bytes(64)
    cases["tensors"] = b"GGUF" + struct.pack("<IQQ", 3, 1000, 0) + bytes(64)
    cases["many"] = b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0)
    cases["key"] = gguf({"": u32(1)}, {})
    cases["alignment"] = gguf({"general.alignment": u32(12)}, {})
    cases["overlap"] = gguf({}, {"a": (0, [1], b"abcd"), "b": (0, [1], b"abcd")}).replace(struct.pack("<IQ", 0, 32), struct.pack("<IQ", 0, 0))
    twice = gguf({}, {"a": (0, [1], b"abcd"), "b": (0, [1], b"abcd")})
    cases["tensor_repeated"] = twice.replace(text("b"), text("a"))
    for name, data in cases.items():
        save("gguf", name, data)


def index_corpus():
    def entry(name, size=8, begin=0):
        return {name: {"dtype": "U8", "shape": [size], "data_offsets": [begin, begin + size]}}

    def index(weights, **metadata):
        return {"metadata": metadata, "weight_map": weights} if metadata else {"weight_map": weights}

    a, b = "a.safetensors", "b.safetensors"
    cases = {"two": [index({"x": a, "y": b}, total_size=16), entry("x"), entry("y")],
             "one": [index({"x": a, "y": a}), {**entry("x", 3), **entry("y", 5, 3)}],
             "float_total": [index({"x": a}, total_size=8.0), entry("x")], "wrong_total": [index({"x": a}, total_size=9), entry("x")],
             "missing": [index({"x": a, "z": a}), entry("x")], "unlisted": [index({"x": a}), {**entry("x", 3), **entry("y", 5, 3)}],
             "swapped": [index({"x": b, "y": a}), entry("x"), entry("y")], "no_shard": [index({"x": "d.safetensors"}), entry("x")],
             "escape": [index({"x": "../a.safetensors"}), entry("x")], "no_string": [index({"x": 1})], "no_map": [{"metadata": {}}],
             "metadata": [{"metadata": 7, "weight_map": {"x": a}}, entry("x")], "unknown": [{"more": 1, "weight_map": {"x": a}}, entry("x")],
             "bad_shard": [index({"x": a}), {"x": {}}]}
    for name, parts in cases.items():
        save("index", name, b"\0".join(json.dumps(p, separators=(",", ":")).encode() for p in parts))
    save("index", "nothing", b"")
    save("index", "repeated", b'{"weight_map":{"x":"a.safetensors","x":"b.safetensors"}}')


def loader_corpus():
    plain = {n: ("F32", s, numbers(count(s))) for n, s in SHAPES.items()}
    cases = {"f32": directory(CONFIG, plain)}
    cases["f16"] = directory(CONFIG, {n: ("F16", s, numbers(count(s), "e")) for n, s in SHAPES.items()})
    cases["mixed"] = directory(CONFIG, {n: ("BF16", s, b"\x80\x3f" * count(s)) if "k_proj" in n else t for n, t in plain.items() for s in [t[1]]})
    cases["untied"] = directory({**CONFIG, "tie_word_embeddings": False}, {**plain, "lm_head.weight": plain["model.embed_tokens.weight"]})
    cases["tied_twice"] = directory(CONFIG, {**plain, "lm_head.weight": plain["model.embed_tokens.weight"]})
    cases["tied_other"] = directory(CONFIG, {**plain, "lm_head.weight": ("F32", [3, 2], bytes(24))})
    cases["inv_freq"] = directory(CONFIG, {**plain, "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [1], bytes(4))})
    cases["left_over"] = directory(CONFIG, {**plain, "x": ("I64", [1], bytes(8))})
    cases["missing"] = directory(CONFIG, {n: t for n, t in plain.items() if "up_proj" not in n})
    cases["misshapen"] = directory(CONFIG, {**plain, "model.norm.weight": ("F32", [1, 2], bytes(8))})
    cases["int"] = directory(CONFIG, {**plain, "model.norm.weight": ("I32", [2], bytes(8))})
    cases["nan"] = directory(CONFIG, {**plain, "model.layers.0.self_attn.v_proj.weight": ("F32", [2, 2], b"\xff" * 16)})
    plain8 = {"quant_method": "fp8", "activation_scheme": "static"}
    for name, scale, q in [("tensor", ([], 1), plain8), ("block", ([1, 2], 2), {"quant_method": "fp8", "weight_block_size": [2, 1]}),
                           ("row", ([2, 1], 2), {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": {
                               "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}}}})]:
        tensors = {}
        for n, t in plain.items():
            if "_proj" not in n:
                tensors[n] = t
                continue
            tensors[n] = ("F8_E4M3", t[1], bytes([0x38, 0x30, 0xB8, 0x28]))
            tensors[n + "_scale"] = ("F32", scale[0], struct.pack(f"<{scale[1]}f", *[0.37] * scale[1]))
        cases["fp8_" + name] = directory({**CONFIG, "quantization_config": q}, tensors)
        cases["fp8_no_config_" + name] = directory(CONFIG, tensors)
        del tensors["model.layers.0.mlp.up_proj.weight_scale"]
        cases["fp8_missing_" + name] = directory({**CONFIG, "quantization_config": q}, tensors)
    one = {n: t for n, t in plain.items()}
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    one[q_proj] = ("F8_E4M3", [2, 2], bytes(4))

    def fp8(name, scale=("F32", [], struct.pack("<f", 0.5)), more=None, **quantization):
        tensors = {**one, q_proj + "_scale": scale, **(more or {})}
        cases["fp8_" + name] = directory({**CONFIG, "quantization_config": {"quant_method": "fp8", **quantization}}, tensors)

    fp8("bf16_scale", ("BF16", [1], b"\x80\x3f"))
    fp8("f16_scale", ("F16", [1, 1], b"\x00\x3c"))
    fp8("int_scale", ("I32", [1], bytes(4)))
    fp8("scale_shape", ("F32", [3], bytes(12)))
    fp8("scale_nan", ("F32", [1], b"\xff" * 4))
    fp8("both", more={q_proj + "_scale_inv": ("F32", [], bytes(4))})
    fp8("left_over", more={"x.weight_scale": ("F32", [], bytes(4))})
    fp8("vector", more={"model.norm.weight": ("F8_E4M3", [2], bytes(2))})
    fp8("input_scale", more={q_proj[:-6] + "input_scale": ("F32", [], bytes(4))}, activation_scheme="static")
    fp8("ignored", ignored_layers=[q_proj[:-7]])
    fp8("ignored_no_names", ignored_layers=[1])
    fp8("activation", activation_scheme="other")
    fp8("unknown", more_bits=3)
    fp8("fmt", fmt="e5m2")
    fp8("blocks", weight_block_size=[0, 1])
    cases["fp8_none"] = directory({**CONFIG, "quantization_config": plain8}, plain)
    cases["fp8_no_object"] = directory({**CONFIG, "quantization_config": 7}, plain)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    inputs = {"num_bits": 8, "type": "float", "dynamic": True}
    for name, group in [("tensor", {"weights": weights, "input_activations": inputs}), ("inputs", {"weights": weights, "input_activations": 7}),
                        ("inputs_4", {"weights": weights, "input_activations": {"num_bits": 4}}), ("no_bits", {"weights": {"strategy": "tensor"}}),
                        ("strategy", {"weights": {**weights, "strategy": "group"}}), ("no_weights", {}),
                        ("structure", {"weights": {**weights, "block_structure": [1, 1]}}),
                        ("blocks", {"weights": {**weights, "strategy": "block", "block_structure": [2, 2]}})]:
        fp8("compressed_" + name, ("F32", [1, 1], struct.pack("<f", 0.5)), quant_method="compressed-tensors", format="float-quantized",
            config_groups={"g": {"targets": ["Linear"], **group}})
    fp8("compressed_groups", quant_method="compressed-tensors", config_groups={})
    cases["gptq"] = directory({**CONFIG, "quantization_config": {"quant_method": "gptq"}}, plain)
    for kind, name, width in [(0, "f32", 2), (1, "f16", 2), (30, "bf16", 2), (8, "q8_0", 32), (2, "q4_0", 32)]:
        cases["gguf_" + name] = b"g" + gguf(model_pairs(embedding=width), model_tensors(kind, width))
    cases["gguf_missing"] = b"g" + gguf(model_pairs(), {k: v for k, v in model_tensors().items() if "ffn_up" not in k})
    cases["gguf_left_over"] = b"g" + gguf(model_pairs(), {**model_tensors(), "blk.0.x.weight": (0, [1], bytes(4))})
    for name, data in cases.items():
        save("loader", name, data)


def safetensors_corpus():
    """The data follows the header and a NUL byte; 0xFF in front: a whole file."""
    def case(name, header, data=b""):
        save("safetensors", name, (header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()) + b"\0" + data)

    def entry(dtype="U8", shape=(1,), offsets=(0, 1), **more):
        return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}}

    case("metadata", {"__metadata__": {"format": "pt"}, **entry()}, b"x")
    case("metadata_no_strings", {"__metadata__": {"format": 1}})
    case("no_entry", {"a": 7})
    case("unknown_field", entry(more=1), b"x")
    case("unknown_dtype", entry("U7"), b"x")
    case("no_count", entry(shape=(-1,)), b"x")
    case("too_many", entry(shape=(1 << 62, 4)), b"x")
    case("half_byte", entry("F4", (3,), (0, 1)), b"x")
    case("offsets", entry(offsets=(0, 1, 2)), b"x")
    case("backwards", entry(offsets=(1, 0)), b"x")
    case("span", entry("F32"), b"x")
    case("far", entry(offsets=(8, 9)), b"x")
    case("behind", entry(), b"xy")
    case("no_brace", b"[]")
    save("safetensors", "short", b"\xff\1\0")
    save("safetensors", "long_header", b"\xff" + struct.pack("<Q", 9) + b"{}")
    save("safetensors", "huge_header", b"\xff" + struct.pack("<Q", 1 << 40) + b"{}")


safetensors_corpus()
gguf_corpus()
index_corpus()
loader_corpus()
