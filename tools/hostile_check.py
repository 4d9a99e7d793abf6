#!/usr/bin/env python3
"""Files and texts that somebody made to hurt, each given to the binary: an error (or, for long texts, an answer) in under 1 s and 64 MiB.

    tools/hostile_check.py [--livequant build/release/livequant] [--json OUT] [--only PART]

Prints processor time, time on the clock and peak resident memory of each; exit 1 if one takes longer, takes more, crashes, is accepted, or is
refused without naming what it should. The limit of 1 s is on processor time, user and system, of the better of two tries, for the machine may
be busy; on the clock a run may take 20 s before it counts as hanging. Not a test of ctest: no test asserts time. tools/release_check.py runs it.
Standard library only.
"""
import argparse
import json
import os
import pathlib
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time

from make_gguf import boolean, f32, f32s, i32s, string, strings, text, u32

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS, CLOCK, BYTES, TRIES = 1.0, 20.0, 64 << 20, 2
SPACE = "\u2581"
# A Llama of one layer and zeros.
VOCAB, WIDTH = 600, 32
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": VOCAB, "hidden_size": WIDTH,
          "intermediate_size": WIDTH, "max_position_embeddings": 256, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
          "head_dim": WIDTH, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True}
SHAPES = {"model.embed_tokens.weight": [VOCAB, WIDTH], "model.norm.weight": [WIDTH],
          **{f"model.layers.0.{p}.weight": [WIDTH, WIDTH] for p in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                                                                     "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]},
          **{f"model.layers.0.{p}.weight": [WIDTH] for p in ["input_layernorm", "post_attention_layernorm"]}}


def header_of(tensors):
    return json.dumps(tensors).encode()


def weights(header=None, length=None, data=None):
    """A safetensors file; by default the model's, all zero."""
    if header is None:
        tensors, at = {}, 0
        for name, shape in SHAPES.items():
            size = 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
            tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
            at += size
        header, data = header_of(tensors), bytes(at)
    return struct.pack("<Q", len(header) if length is None else length) + header + (data or b"")


def entry(dtype="U8", shape=(1,), offsets=(0, 1)):
    return header_of({"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}})


BYTE_NAMES = [f"<0x{b:02X}>" for b in range(256)]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def special(i, content):
    return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def tokenizer(model, normalizer=None, pre=None, decoder=None, added=()):
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special(0, "<s>"), special(1, "</s>"), *added], "normalizer": normalizer,
            "pre_tokenizer": pre, "post_processor": None, "decoder": decoder or {"type": "Fuse"}, "model": model}


def doublings(letter, most):
    """aa, aaaa, ...: the merges that a run of one letter needs."""
    out, n = [], 1
    while 2 * n <= most:
        out.append((letter * n, letter * n))
        n *= 2
    return out


def sentencepiece_bpe():
    pieces = ["<s>", "</s>", "<unk>", *BYTE_NAMES, SPACE, *LETTERS]
    merges = doublings("a", 128) + doublings(SPACE, 16) + [(a, b) for a in "bcdefgh" for b in "bcdefgh"]
    pieces += [a + b for a, b in merges]
    return pieces, merges


def json_bpe():
    pieces, merges = sentencepiece_bpe()
    return tokenizer({"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": {p: i for i, p in enumerate(pieces)},
                      "merges": [list(m) for m in merges]},
                     {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]})


def json_byte_level(pattern=None):
    alphabet, extra = {}, 0
    for b in range(256):
        plain = 0x21 <= b <= 0x7e or 0xa1 <= b <= 0xac or b >= 0xae
        alphabet[b] = chr(b if plain else 0x100 + extra)
        extra += not plain
    merges = doublings("a", 128) + doublings(alphabet[32], 16)
    pieces = ["<s>", "</s>", *alphabet.values(), *(a + b for a, b in merges)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pattern is None}
    pre = level if pattern is None else {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, level]}
    return tokenizer({"type": "BPE", "vocab": {p: i for i, p in enumerate(pieces)}, "merges": [list(m) for m in merges]}, None, pre, {"type": "ByteLevel"})


def json_unigram(longest=16):
    vocab = [["<s>", 0], ["</s>", 0], ["<unk>", 0], [SPACE, -2], *([c, -3.0 - i / 9] for i, c in enumerate(LETTERS))]
    vocab += [["a" * n, -3.5 - n / 100] for n in range(2, longest + 1)] + [[SPACE * n, -3.0 - n / 100] for n in range(2, 17)]
    return tokenizer({"type": "Unigram", "unk_id": 2, "byte_fallback": False, "vocab": vocab}, None,
                     {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True},
                     {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True})


def gguf(pairs, tensors=0, count=None, version=3, rest=b""):
    body = b"".join(text(k) + v for k, v in pairs.items())
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(pairs) if count is None else count) + body + rest


def gguf_model(**changes):
    """The model and a SentencePiece tokenizer; a change of None leaves a key out."""
    pieces, merges = sentencepiece_bpe()
    made = {a + b for a, b in merges}
    types = [3, 3, 2] + [6] * 256 + [1] * (len(pieces) - 259)
    pairs = {"general.architecture": string("llama"), "llama.context_length": u32(256), "llama.embedding_length": u32(WIDTH), "llama.block_count": u32(1),
             "llama.feed_forward_length": u32(WIDTH), "llama.attention.head_count": u32(1), "llama.rope.freq_base": f32(10000.0),
             "llama.attention.layer_norm_rms_epsilon": f32(1e-5), "tokenizer.ggml.eos_token_id": u32(1), "tokenizer.ggml.bos_token_id": u32(0),
             "tokenizer.ggml.model": string("llama"), "tokenizer.ggml.tokens": strings(pieces), "tokenizer.ggml.token_type": i32s(types),
             "tokenizer.ggml.scores": f32s([-float(i) if p in made else -1000.0 for i, p in enumerate(pieces)])}
    for key, value in changes.items():
        key = key.replace("__", ".")
        pairs = {k: v for k, v in pairs.items() if k != key} | ({} if value is None else {key: value})
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for a, b in [("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
                 ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"),
                 ("post_attention_layernorm", "ffn_norm")]:
        names[f"model.layers.0.{a}.weight"] = f"blk.0.{b}.weight"
    infos, at = b"", 0
    for name, shape in SHAPES.items():
        infos += text(names[name]) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", d) for d in shape[::-1]) + struct.pack("<IQ", 0, at)
        at += 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
    head = gguf(pairs, tensors=len(SHAPES), rest=infos)
    return head + bytes(-len(head) % 32) + bytes(at)


def spawn():
    """Runs commands that come as lines of JSON: [exit code, processor seconds, seconds on the clock, peak bytes]. A process of its own, because a child's peak starts at
    that of whoever forks it, and this one stays small."""
    for line in sys.stdin:
        job = json.loads(line)
        with open(job["in"], "rb") as stdin, open(job["out"], "wb") as out, open(job["err"], "wb") as err:
            start = time.monotonic()
            child = subprocess.Popen(job["args"], stdin=stdin, stdout=out, stderr=err,
                                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (30, 30)))  # far beyond its limits it ends
            _, status, usage = os.wait4(child.pid, 0)
            seconds = time.monotonic() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        print(json.dumps([child.returncode, usage.ru_utime + usage.ru_stime, seconds, usage.ru_maxrss * 1024]), flush=True)


class Run:
    def __init__(self, binary, work):
        self.binary, self.work, self.rows, self.bad = binary, work, [], 0
        self.part = ""
        self.spawner = subprocess.Popen([sys.executable, __file__, "--spawn"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def directory(self, **files):
        """A good model with some files replaced: config, tokenizer, template (text) and weights (bytes)."""
        folder = self.work / "model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        dump = lambda v: v if isinstance(v, str) else json.dumps(v)
        (folder / "config.json").write_text(dump(files.get("config", CONFIG)))
        (folder / "tokenizer.json").write_text(dump(files.get("tokenizer", json_bpe())))
        (folder / "model.safetensors").write_bytes(files.get("weights", weights()))
        if "template" in files:
            (folder / "chat_template.jinja").write_text(files["template"])
        return folder

    def file(self, name, data):
        path = self.work / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    def once(self, args, given):
        (self.work / "in").write_bytes(given.encode() if isinstance(given, str) else given)
        job = {"args": [str(self.binary), *map(str, args)], "in": str(self.work / "in"), "out": str(self.work / "out"), "err": str(self.work / "err")}
        self.spawner.stdin.write(json.dumps(job) + "\n")
        self.spawner.stdin.flush()
        code, seconds, clock, peak = json.loads(self.spawner.stdout.readline())
        return code, seconds, clock, peak, (self.work / "err").read_text(errors="replace") + (self.work / "out").read_text(errors="replace")

    def check(self, name, args, says, given="", codes=(1, 2)):
        best = None
        for _ in range(TRIES):
            got = self.once(args, given)
            if best is None or got[1] < best[1]:
                best = got
            if best[1] < SECONDS:
                break
        exit_code, seconds, clock, peak, output = best
        wrong = []
        if exit_code not in codes:
            wrong.append(f"exit {exit_code}")
        if seconds >= SECONDS:
            wrong.append("too slow")
        if clock >= CLOCK:
            wrong.append("hangs")
        if peak >= BYTES:
            wrong.append("too much memory")
        if says not in output:
            wrong.append(f"does not say {says!r}: {output.strip()[:200]!r}")
        if len(output) > 3000:
            wrong.append(f"says {len(output)} bytes")
        self.bad += bool(wrong)
        self.rows.append({"part": self.part, "name": name, "seconds": round(seconds, 3), "clock": round(clock, 3), "mib": round(peak / 2**20, 1), "wrong": wrong})
        print(f"{'FAIL' if wrong else 'ok':4s} {seconds:6.3f} s ({clock:6.3f}) {peak / 2**20:6.1f} MiB  {self.part}: {name}{'  ' + '; '.join(wrong) if wrong else ''}", flush=True)


def safetensors(r):
    for name, data, says in [
            ("43 bytes that ask for 1 GiB of header", weights(b"x" * 35, 1 << 30), "104857600"),
            ("a header of 90 MiB in a file of 10 bytes", weights(b"{}", 90 << 20), "the file has"),
            ("2^40 rows", weights(entry("F32", (1 << 40, 1), (0, 1 << 42))), "4398046511104"),
            ("2^32 x 2^32", weights(entry("F32", (1 << 32, 1 << 32), (0, 0))), "2^63"),
            ("100000 open brackets", weights(b'{"a":' + b"[" * 100000), "deeper"),
            ("50000 tensors of nothing", weights(b"{" + b",".join(b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(50000)) + b"}"), "embed_tokens"),
            ("a million values", weights(b'{"a":[' + b"1," * 999999 + b"1]}"), "\"a\""),
            ("a name of 1 MiB", weights(header_of({"n" * (1 << 20): 1})), "nnn"),
            ("the same name 20000 times", weights(b"{" + b",".join([b'"t":1'] * 20000) + b"}"), "repeated"),
            ("empty", b"", "model.safetensors"), ("cut", weights()[:-1], "the file has")]:
        r.check(name, ["run", "-m", r.directory(weights=data), "-p", "x", "-n", 1], says)


def config(r):
    for name, value, says in [
            ("2^40 layers", {**CONFIG, "num_hidden_layers": 1 << 40}, "1099511627776"), ("1000 layers", {**CONFIG, "num_hidden_layers": 1000}, "layers.1"),
            ("4 million tokens", {**CONFIG, "vocab_size": 4000000}, "4000000"), ("2^31 channels", {**CONFIG, "hidden_size": 1 << 31}, "2147483648"),
            ("-4 heads", {**CONFIG, "num_attention_heads": -4}, "-4"), ("half a head", {**CONFIG, "num_attention_heads": 4.5}, "4.5"),
            ("a megabyte of brackets", "[" * (1 << 20), "deeper"), ("5 MiB of blanks", " " * (5 << 20), "limit"),
            ("a number of a million digits", json.dumps(CONFIG)[:-1] + ', "x": ' + "9" * 1000000 + "}", "config.json"),
            ("100000 unknown fields", {**CONFIG, **{f"f{i}": 0 for i in range(100000)}}, "f")]:
        r.check(name, ["run", "-m", r.directory(config=value), "-p", "x", "-n", 1], says)


def gguf_files(r):
    nested = struct.pack("<I", 9) + b"".join(struct.pack("<IQ", 9, 1) for _ in range(1000))
    for name, data, says in [
            ("2^60 tensors", gguf({}, tensors=1 << 60), "tensors"), ("2^62 pairs", gguf({}, count=1 << 62), "metadata pairs"),
            ("a string of 1 GiB", gguf({"general.name": struct.pack("<IQ", 8, 1 << 30)}), "1073741824"),
            ("2^30 strings", gguf({"general.name": struct.pack("<IIQ", 9, 8, 1 << 30)}), "1073741824"),
            ("1000 nested arrays", gguf({"general.name": nested}), "deeper than 4"),
            ("a million empty strings", gguf({"x": strings([""] * 1000000)}), "general.architecture"),
            ("60000 keys", gguf({f"k{i}": u32(0) for i in range(60000)}), "general.architecture"),
            ("900 layers", gguf_model(llama__block_count=u32(900)), "layers.1"), ("0 heads", gguf_model(llama__attention__head_count=u32(0)), "at least 1"),
            ("2^31 channels", gguf_model(llama__embedding_length=u32(1 << 31)), "2147483648"),
            ("cut", gguf_model()[:-1], "the file has"), ("version 1", gguf({}, version=1), "version 1")]:
        r.check(name, ["run", "-m", r.file("m.gguf", data), "-p", "x", "-n", 1], says)
    many = [f"{i:x}" for i in range(200000)]
    for name, changes, says in [
            ("another model", {"tokenizer__ggml__model": string("rwkv")}, "rwkv"), ("no scores", {"tokenizer__ggml__scores": None}, "tokenizer.ggml.scores"),
            ("a token of 1 MiB", {"tokenizer__ggml__tokens": strings(["a" * (1 << 20)]), "tokenizer__ggml__scores": f32s([0]), "tokenizer__ggml__token_type": i32s([1])}, "limit 256"),
            ("200000 tokens twice", {"tokenizer__ggml__tokens": strings(many * 2), "tokenizer__ggml__scores": f32s([0] * 400000),
                                     "tokenizer__ggml__token_type": i32s([1] * 400000)}, "and at 200000"),
            ("tokens that merge in every way", {"tokenizer__ggml__tokens": strings([f"{i:0{n}b}" for n in range(1, 17) for i in range(1 << n)] + ["<unk>"]),
                                                "tokenizer__ggml__scores": f32s([0] * ((1 << 17) - 1)), "tokenizer__ggml__token_type": i32s([1] * ((1 << 17) - 2) + [2])}, "pairs that merge")]:
        r.check(f"tokenizer: {name}", ["run", "-m", r.file("m.gguf", gguf_model(**changes)), "-p", "x", "-n", 1], says)


def tokenizers(r):
    def bpe(**changes):
        t = json_bpe()
        t["model"].update(changes)
        return t
    long = "x" * 500
    for name, value, says in [
            ("a megabyte of brackets", "[" * (1 << 20), "deeper"), ("a million merges of one", bpe(merges=["a a"] * 300000), "twice"),
            ("a vocabulary of numbers", bpe(vocab={str(i): "x" for i in range(200000)}), "no token id"), ("id 2^31", bpe(vocab={"<unk>": 1 << 31}), "2147483648"),
            ("ids far apart", bpe(vocab={"<unk>": 2, "a": 2147483646}, merges=[]), "2147483646"),
            ("a pattern that does not compile", json_byte_level("(" * 3000 + "a"), "pattern"),
            ("a pattern of 10^9 copies", json_byte_level("((((a{1,99}){1,99}){1,99}){1,99}){1,9}"), "pattern"),
            ("a charsmap of nothing", {**json_unigram(), "normalizer": {"type": "Precompiled", "precompiled_charsmap": "A" * 100000}}, "charsmap"),
            ("1000 normalizers", {**json_bpe(), "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000}}, "32 steps"),
            ("a token of 2000 bytes", {**json_unigram(), "model": {"type": "Unigram", "unk_id": 0, "vocab": [["a" * 2000, 0]]}}, "limit 128"),
            ("100000 unknown fields", {**json_bpe(), **{f"f{i}": 0 for i in range(100000)}}, "unknown field")]:
        r.check(name, ["run", "-m", r.directory(tokenizer=value), "-p", "x", "-n", 1], says)
    catastrophe = json_byte_level("(a+)+$|b")
    r.check("a pattern that backtracks", ["run", "-m", r.directory(tokenizer=catastrophe), "-n", 1], "match limit", "a" * 2000 + "c")
    near = {**json_bpe(), "normalizer": {"type": "Replace", "pattern": {"String": "a" * 500000 + "b"}, "content": "c"}}
    r.check("a literal that nearly matches", ["run", "-m", r.directory(tokenizer=near), "-n", 1], "tokens", "a" * (1 << 20))
    grow = {**json_bpe(), "normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "x"}, "content": long}] * 4}}
    r.check("a normalizer that makes 500^4 of one", ["run", "-m", r.directory(tokenizer=grow), "-n", 1], "more than 65024", "x" * 1000)


def long_texts(r):
    """A megabyte in one piece, whatever the kind of tokenizer: linear, or nearly so. The answer: more tokens than positions."""
    rng = random.Random(5)
    n = 1 << 20
    texts = {"one letter": "a" * n, "two letters in turn": "ab" * (n // 2), "random letters": "".join(rng.choices(LETTERS, k=n)),
             "letters of merges": "".join(rng.choices("bcdefgh", k=n)), "blanks": " " * n, "newlines": "\n" * n,
             "characters without a token": "\u4e2d\u6587" * (n // 6), "combining marks": "a" + "\u0301" * (n // 2), "added tokens": "<s>" * (n // 3),
             "beginnings of added tokens": "<s" * (n // 2)}
    kinds = {"byte-level BPE": r.directory(tokenizer=json_byte_level()), "BPE of tokenizer.json": None, "BPE of GGUF": r.file("m.gguf", gguf_model()), "unigram": None,
             "unigram of 128 letters": None, "NFKC and lower case": None}
    for kind in kinds:
        for name, given in texts.items():
            if kind == "BPE of GGUF":
                path = r.file("m.gguf", gguf_model())
            else:
                path = r.directory(tokenizer={"byte-level BPE": json_byte_level, "BPE of tokenizer.json": json_bpe, "unigram": json_unigram,
                                              "unigram of 128 letters": lambda: json_unigram(128),
                                              "NFKC and lower case": lambda: {**json_bpe(), "normalizer": {"type": "Sequence", "normalizers": [
                                                  {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "StripAccents"}]}}}[kind]())
            r.check(f"{kind}, {name}", ["run", "-m", path, "-n", 1], "tokens", given, (0, 2))


def templates(r):
    loop = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    for name, source, says in [
            ("10^10 turns of a loop", loop, "limit"), ("range of 10^12", "{{ range(1000000000000) | length }}", "a range of more than"),
            ("10^9 letters", "{{ 'x' * 1000000000 }}", "limit"), ("10^18 letters", "{{ 'x' * 1000000000000000000 }}", "limit"),
            ("a text that doubles", "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "limit"),
            ("a text that doubles by ~", "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "limit"),
            ("a list that doubles", "{% set ns = namespace(s=[1]) %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "limit"),
            ("a list that holds itself twice", "{% set ns = namespace(s=[1]) %}{% for i in range(50) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}", "limit"),
            ("the same as JSON", "{% set ns = namespace(s=[1]) %}{% for i in range(50) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}", "limit"),
            ("the same compared", "{% set n = namespace(s=[1], t=[1]) %}{% for i in range(50) %}{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.s == n.t }}", "limit"),
            ("replace that grows", "{% set ns = namespace(s='xx') %}{% for i in range(40) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}", "limit"),
            ("join that grows", "{% set ns = namespace(s='xx') %}{% for i in range(40) %}{% set ns.s = (ns.s | list) | join(ns.s) %}{% endfor %}", "limit"),
            ("a macro that calls itself", "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", ""),
            ("a tree of macros", "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", ""),
            ("a million letters, each alone", "{% for i in range(1000) %}{{ ('x' * 1000000) | list | length }}{% endfor %}", "limit"),
            ("split into a million", "{% for i in range(1000) %}{{ ('x ' * 500000).split(' ') | length }}{% endfor %}", "limit"),
            ("sorting over and over", "{% for i in range(1000) %}{{ range(100000) | list | sort | length }}{% endfor %}", "limit"),
            ("searching over and over", "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{{ 'ab' in s }}{% endfor %}", "limit"),
            ("slices over and over", "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{% set t = s[1:] %}{% endfor %}", "limit"),
            ("a needle that nearly matches", "{% set s = 'a' * 1000000 %}{% set t = 'a' * 500000 + 'b' %}{{ t in s }}{{ s.find(t) }}{{ s.rfind(t) }}{{ s.count(t) }}"
             "{{ s.replace(t, '') | length }}{{ s.split(t) | length }}{{ s.rsplit(t) | length }}", ""),
            ("long texts compared", "{% set s = 'a' * 1000000 %}{% set t = 'a' * 1000000 %}{% for i in range(100000) %}{{ s == t }}{% endfor %}", "limit"),
            ("long keys", "{% set s = 'a' * 1000000 %}{% set d = {s: 1} %}{% for i in range(100000) %}{{ d[s] }}{% endfor %}", "limit"),
            ("rsplit of a million", "{% set s = 'ab' * 500000 %}{{ s.rsplit('b') | length }}", "limit"),
            ("numbers that grow", "{% set ns = namespace(n=2) %}{% for i in range(100000) %}{% set ns.n = ns.n * ns.n %}{% endfor %}", ""),
            ("a power of a power", "{{ 9 ** 9 ** 9 ** 9 }}", ""), ("indent of 10^9", "{{ 'a\\nb' | indent(1000000000) }}", ""),
            ("10000 parentheses", "{{ " + "(" * 10000 + "1" + ")" * 10000 + " }}", "64"), ("10000 ifs", "{% if 1 %}" * 10000 + "{% endif %}" * 10000, "64"),
            ("10000 nots", "{{ " + "not " * 10000 + "1 }}", "64"), ("10000 brackets", "{{ " + "[" * 10000 + "]" * 10000 + " }}", "64"),
            ("a chain of 100000 filters", "{{ 1" + " | string" * 100000 + " }}", ""), ("100000 additions", "{{ 1" + " + 1" * 100000 + " }}", ""),
            ("2 MiB", "x" * (2 << 20), "limit"), ("a megabyte of open statements", "{% " * 300000, ""), ("a megabyte of open comments", "{#" * 500000, ""),
            ("output without end", "{% for j in range(100) %}{% for i in range(100000) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}", "limit"),
            ("lists kept", "{% set ns = namespace(s=[]) %}{% for i in range(100000) %}{% set ns.s = [ns.s] %}{% endfor %}", ""),
            ("appending without end", "{% set s = [] %}{% for j in range(100) %}{% for i in range(100000) %}{% set _ = s.append(i) %}{% endfor %}{% endfor %}", ""),
            ("a namespace of many", "{% set ns = namespace(s={}) %}{% for i in range(100000) %}{% set _ = ns.s.update({i: i}) %}{% endfor %}", "")]:
        r.check(name, ["run", "-i", "-m", r.directory(template=source), "-n", 1], says, "hello\n", (1, 2) if says else (0, 1, 2))


def policies(r):
    layer = {"layers": "0", "base": "f16"}
    for name, value, says in [
            ("a megabyte of brackets", "[" * 1000000, "deeper"), ("2 MiB", " " * (2 << 20), "limit"),
            ("layers 0 to 10^18", {"version": 1, "base": "f16", "layers": [{**layer, "layers": "0-1000000000000000000"}]}, "layers"),
            ("50000 forms of one layer", {"version": 1, "base": "f16", "layers": [layer] * 20000}, "layers"),
            ("a closure of 2^62", {"version": 1, "base": "kivi2", "k_closure": {"lag": 1 << 62, "step": 1 << 62}}, "4611686018427387904"),
            ("2^40 pinned rows", {"version": 1, "base": "kivi2", "pinned_rows": 1 << 40}, "1099511627776"),
            ("pages of 2^31 rows", {"version": 1, "base": "kivi2", "coded_page_rows": 1 << 31}, "2147483648")]:
        path = r.file("p.json", value if isinstance(value, str) else json.dumps(value))
        r.check(name, ["inspect", path, "-m", r.directory()], says)


def requests(r):
    model = r.directory()
    for name, value, says in [
            ("a megabyte of brackets", "[" * 1000000, "line 1"), ("200000 lines, the last one wrong", '{"prompt": "a"}\n' * 30000 + "{", "line 30001"),
            ("a prompt of a megabyte", json.dumps({"prompt": "a" * (1 << 20)}), "line 1"), ("2^62 tokens", '{"prompt": "a", "n": 4611686018427387904}', "line 1")]:
        r.check(name, ["run", "-m", model, "--prompts", r.file("p.jsonl", value)], says)


PARTS = {"safetensors": safetensors, "config.json": config, "GGUF": gguf_files, "tokenizer.json": tokenizers, "long texts": long_texts, "chat templates": templates,
         "policies": policies, "requests": requests}


def main():
    if sys.argv[1:] == ["--spawn"]:
        return spawn()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--livequant", type=lambda p: pathlib.Path(p).resolve(), default=ROOT / "build/release/livequant")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", choices=sorted(PARTS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        r = Run(args.livequant, pathlib.Path(work))
        for r.part, part in PARTS.items():
            if args.only in (None, r.part):
                part(r)
    slowest, largest = max(r.rows, key=lambda x: x["seconds"]), max(r.rows, key=lambda x: x["mib"])
    print(f"{len(r.rows)} inputs, {r.bad} bad; slowest {slowest['seconds']} s ({slowest['name']}), largest {largest['mib']} MiB ({largest['name']})")
    if args.json:
        args.json.write_text(json.dumps(r.rows, indent=1) + "\n")
    sys.exit(1 if r.bad else 0)


if __name__ == "__main__":
    main()
