#!/usr/bin/env python3
"""Files through the binary: GGUF models equal their directory, rows recorded, encoded and decoded, what inspect says of all of them.

    files_test.py BINARY SOURCE_DIR
"""
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

BINARY, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])
MODEL = SOURCE / "models/books-7m"
PRESETS = ["f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "kivi4", "kivi2", "kivi2_sync", "qserve8", "qserve4"]


def run(*args):
    done = subprocess.run([BINARY, *map(str, args)], capture_output=True, env={**os.environ, "LIVEQUANT_MODEL": str(MODEL)})
    return done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace")


def good(*args):
    code, out, err = run(*args)
    assert code == 0, f"{args}: exit {code}: {err}{out}"
    return out


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.dir)

    def refused(self, *args, says=()):
        code, out, err = run(*args)
        self.assertEqual(code, 1, f"{args}: {err}")
        self.assertNotIn("invariant broken", err)
        for word in says:
            self.assertIn(word, err)


class Gguf(Case):
    def make(self, kind, *more):
        out = self.dir / f"{kind}.gguf"
        subprocess.run([sys.executable, SOURCE / "tools/make_gguf.py", MODEL, out, "--type", kind, *more], check=True)
        return out

    def logits(self, model):
        ids = ",".join(str(5 + 37 * i % 4000) for i in range(40))
        return json.loads(good("eval", "logits", "-m", model, "--token-ids", ids, "--positions", "0,20,39", "--generate", 6, "--json"))

    def test_equal_weights_give_equal_bits_and_text(self):
        want = self.logits(MODEL)
        prompt = ["-p", "The old man looked at the sea, and it's 42 o'clock\n", "-n", 24]
        text = good("run", "-m", MODEL, *prompt)
        for kind, more in [("bf16", []), ("f32", ["--version", "2"])]:
            path = self.make(kind, *more)
            got = self.logits(path)
            self.assertEqual(got["positions"], want["positions"], kind)
            self.assertEqual(got["generated"], want["generated"], kind)
            self.assertNotEqual(got["context"]["model"]["digest"], want["context"]["model"]["digest"])
            self.assertEqual(good("run", "-m", path, *prompt), text, kind)

        path = self.dir / "bf16.gguf"  # everything else that takes a model
        self.assertEqual(*({k: v for k, v in json.loads(good("ledger", "-m", m, "--json")).items() if k != "context"} for m in (path, MODEL)))
        shown = json.loads(good("inspect", path, "--json"))
        self.assertEqual((shown["kind"], shown["refused"], len(shown["tensors"])), ("GGUF", [], 74))
        self.assertEqual(shown["model_digest"], self.logits(path)["context"]["model"]["digest"])

    def test_a_sentencepiece_tokenizer(self):
        space, letters = "\u2581", "abcdefghijklmnopqrstuvwxyz,."
        vocab = ["<unk>", "<s>", "</s>", space, *letters, "th", "the", space + "the", "an", "and", space + "and", space + "a"]
        vocab += [chr(0x4e00 + i) for i in range(199 - len(vocab))]  # the model may answer with any id
        merges = [["t", "h"], ["a", "n"], ["th", "e"], [space, "the"], ["an", "d"], [space, "and"], [space, "a"]]
        special = [{"id": i, "content": c, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
                   for i, c in enumerate(vocab[:3])]
        bos = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
               "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
        model = self.dir / "model"
        shutil.copytree(SOURCE / "tests/model/golden/llama_bias", model)
        (model / "tokenizer.json").write_text(json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": space}, {"type": "Replace", "pattern": {"String": " "}, "content": space}]},
            "pre_tokenizer": None, "post_processor": bos,
            "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": space}, "content": " "}, {"type": "Fuse"},
                                                         {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": False, "vocab": {t: i for i, t in enumerate(vocab)}, "merges": merges}}))
        file = self.dir / "model.gguf"
        subprocess.run([sys.executable, SOURCE / "tools/make_gguf.py", model, file, "--type", "f32"], check=True)
        for prompt in ["the hand and a band", "then, the sea and  42 land.", "</s>the end"]:
            want, got = (json.loads(good("run", "-m", m, "-p", prompt, "-n", 1, "--json")) for m in (model, file))
            self.assertEqual((got["prompt_tokens"], got["token_ids"]), (want["prompt_tokens"], want["token_ids"]), prompt)
        shown = json.loads(good("inspect", file, "--json"))
        self.assertEqual((shown["refused"], shown["tokenizer"]["ids"]), ([], len(vocab)))
        whole = file.read_bytes()
        file.write_bytes(whole.replace(b"tokenizer.ggml.scores", b"tokenizer.ggml.scorez"))
        self.refused("run", "-m", file, "-p", "a", "-n", 1, says=["tokenizer.ggml.scores", "is missing"])

    def test_every_architecture_and_rope_type(self):
        goldens = [d for d in sorted((SOURCE / "tests/model/golden").iterdir()) if "attention" not in d.name and "mscale" not in d.name]
        self.assertGreaterEqual(len(goldens), 20)
        for golden in goldens:  # without those that GGUF has no key for: YaRN with a factor of its own
            path = self.dir / "golden.gguf"
            subprocess.run([sys.executable, SOURCE / "tools/make_gguf.py", golden, path, "--type", "f32"], check=True)
            args = ["--token-ids", "3,5,7,11,13,17,19,23,29,31,37,41,43,47", "--positions", "0,5,13", "--generate", 5, "--json"]
            want, got = (json.loads(good("eval", "logits", "-m", m, *args)) for m in (golden, path))
            self.assertEqual((got["positions"], got["generated"]), (want["positions"], want["generated"]), golden.name)

    def test_quantized_weights_stay_near(self):
        file = MODEL / "eval/heldout_books.txt"

        def perplexity(model):
            return json.loads(good("eval", "perplexity", "-m", model, "-f", file, "-c", 128, "--max-tokens", 512,
                                   "--kv-cache-dtype", "f32", "--json"))["results"][0]["perplexity"]

        want = perplexity(MODEL)
        for kind, within in [("f16", 0.001), ("q8_0", 0.01), ("q4_0", 0.25)]:
            self.assertLess(abs(perplexity(self.make(kind)) / want - 1), within, kind)

    def test_other_pre_tokenizers_and_damage(self):
        path = self.make("q8_0", "--pre", "unheard-of")
        self.refused("run", "-m", path, "-p", "Hi", "-n", 1, says=["tokenizer.ggml.pre", "unheard-of"])
        good("eval", "logits", "-m", path, "--token-ids", "1,2")  # needs no tokenizer
        code, out, _ = run("inspect", path)
        self.assertEqual(code, 1)
        self.assertIn("unheard-of", out)
        whole = path.read_bytes()
        for name, data, says in [("empty", b"", "magic"), ("cut", whole[:-1], "tensor"), ("cut in metadata", whole[:3000], "the file has"),
                                 ("version 1", whole[:4] + struct.pack("<I", 1) + whole[8:], "version 1"),
                                 ("big endian", whole[:4] + struct.pack(">I", 3) + whole[8:], "big-endian"),
                                 ("tensors", whole[:8] + struct.pack("<Q", 1 << 62) + whole[16:], "tensors"),
                                 ("layers", whole.replace(b"llama.block_count\x04\0\0\0\x08", b"llama.block_count\x04\0\0\0\x09"), "layers.8"),
                                 ("unknown key", whole.replace(b"llama.vocab_size", b"llama.logit_size"), "llama.logit_size"),
                                 ("architecture", whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"), "mamba")]:
            with self.subTest(name):
                self.assertNotEqual(data, whole)
                path.write_bytes(data)
                self.refused("run", "-m", path, "-p", "Hi", "-n", 1, says=[path.name, says])


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    return {k: (v["dtype"], v["shape"], raw[8 + size + v["data_offsets"][0]:8 + size + v["data_offsets"][1]]) for k, v in header.items()
            if k != "__metadata__"}, header.get("__metadata__", {})


def floats(values, kind="f"):
    return struct.unpack(f"<{len(values) // struct.calcsize(kind)}{kind}", values)


class Record(Case):
    def test_is_the_run_and_its_bytes_are_encodes(self):
        record, rows, coded = (self.dir / f"{n}.safetensors" for n in ("record", "rows", "coded"))
        prompt = ["-p", "The old man looked at the sea. " * 20, "-n", 9, "--ignore-eos"]
        for preset in ["fp8_e4m3", "kivi2", "qserve4"]:
            out = json.loads(good("run", *prompt, "--kv-cache-dtype", preset, "--prefill-chunk", 100, "--record", record, "--json"))
            plain = json.loads(good("run", *prompt, "--kv-cache-dtype", preset, "--json"))
            self.assertEqual(out["token_ids"], plain["token_ids"])
            tensors, meta = read_safetensors(record)
            n, steps = out["cache_rows"], json.loads(meta["steps"])
            self.assertEqual((sum(steps), steps[0], steps[-1]), (n, 100, 1))
            self.assertEqual(tensors["attention.7"][:2], ("F32", [n, 4, 64]))
            self.assertEqual(json.loads(meta["shape"]), {"layers": 8, "kv_heads": 2, "q_heads": 4, "head_dim": 64})
            given = [f"{t}.{layer}" for t in "kv" for layer in range(8)]
            write_safetensors(rows, {name: tensors[name] for name in given})
            good("encode", rows, coded, "--kv-cache-dtype", preset)
            arrays = {k: v for k, v in tensors.items() if k.count(".") == 2}
            self.assertEqual(read_safetensors(coded)[0], arrays, preset)
            # A row sees itself alone at position 0: its attention is its values, rounded to what the cache keeps.
            if preset == "kivi2":
                first = struct.unpack("<64f", tensors["attention.0"][2][:256])
                value = struct.unpack("<64e", struct.pack("<64e", *struct.unpack("<64f", tensors["v.0"][2][:256])))
                self.assertEqual(first, value)

    def test_refusals(self):
        for args, says in [(["--record", ""], "--record"), (["--record", self.dir / "r", "-i"], "--record")]:
            code, _, err = run("run", *(["-p", "Hi"] if "-i" not in args else []), *args)
            self.assertEqual(code, 2, err)
            self.assertIn(says, err)
        self.refused("run", "-p", "Hi", "-n", 1, "--record", self.dir / "none" / "r.safetensors", says=["none"])
        self.assertEqual(list(self.dir.iterdir()), [])


class EncodeDecode(Case):
    TOKENS, HEADS, DIM = 150, 2, 64

    def setUp(self):
        super().setUp()
        rng = random.Random(5)
        count = self.TOKENS * self.HEADS * self.DIM
        self.rows = {n: [struct.unpack("<f", struct.pack("<f", rng.gauss(0, 1)))[0] for _ in range(count)] for n in ("k.0", "v.0", "k.1", "v.1")}
        self.input = self.dir / "rows.safetensors"
        write_safetensors(self.input, {n: ("F32", [self.TOKENS, self.HEADS, self.DIM], struct.pack(f"<{count}f", *v)) for n, v in self.rows.items()})
        self.coded, self.decoded = self.dir / "coded.safetensors", self.dir / "decoded.safetensors"

    def test_every_preset_comes_back(self):
        bound = {"f32": 0, "f16": 0.003, "bf16": 0.02, "fp8_e4m3": 0.2, "fp8_e5m2": 0.4, "int8": 0.04, "int4": 0.5, "int2": 4.0, "kivi4": 0.3,
                 "kivi2": 1.2, "kivi2_sync": 1.2, "qserve8": 0.03, "qserve4": 0.4}
        for preset in PRESETS:
            good("encode", self.input, self.coded, "--kv-cache-dtype", preset)
            good("decode", self.coded, self.decoded)
            tensors, _ = read_safetensors(self.decoded)
            self.assertEqual(set(tensors), set(self.rows), preset)
            for name, (dtype, shape, values) in tensors.items():
                self.assertEqual((dtype, shape), ("F32", [self.TOKENS, self.HEADS, self.DIM]))
                worst = max(abs(a - b) for a, b in zip(floats(values), self.rows[name]))
                self.assertLessEqual(worst, bound[preset], f"{preset} {name}")
            # Decoded rows are values of the format, so that a row that was coded alone gives its own bytes again.
            if preset in ("f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2"):
                again = self.dir / "again.safetensors"
                good("encode", self.decoded, again, "--kv-cache-dtype", preset)
                self.assertEqual(read_safetensors(again)[0], read_safetensors(self.coded)[0], preset)

    def test_the_page_describes_the_bytes(self):
        """docs/formats/rows.md, read by somebody else's program."""
        good("encode", self.input, self.coded, "--kv-cache-dtype", "int8")
        good("decode", self.coded, self.decoded)
        coded, metadata = read_safetensors(self.coded)
        decoded, _ = read_safetensors(self.decoded)
        self.assertEqual(set(coded), {f"{t}.{l}.{p}" for t in "kv" for l in (0, 1) for p in ("codes", "scales")})
        self.assertEqual(json.loads(metadata["frontiers"]), {"k": [150, 150], "v": [150, 150]})
        codes, scales = floats(coded["v.1.codes"][2], "b"), floats(coded["v.1.scales"][2], "e")
        self.assertEqual(coded["v.1.codes"][:2], ("U8", [self.HEADS, self.TOKENS, self.DIM]))
        groups = coded["v.1.scales"][1][2]
        want = floats(decoded["v.1"][2])
        for head, token, channel in [(0, 0, 0), (1, 149, 63), (1, 77, 31), (0, 128, 5)]:
            row = head * self.TOKENS + token
            value = codes[row * self.DIM + channel] * scales[row * groups + channel // (self.DIM // groups)]
            self.assertEqual(value, want[(token * self.HEADS + head) * self.DIM + channel])

        good("encode", self.input, self.coded, "--kv-cache-dtype", "kivi2")
        good("decode", self.coded, self.decoded)
        coded, metadata = read_safetensors(self.coded)
        decoded, _ = read_safetensors(self.decoded)
        frontier = json.loads(metadata["frontiers"])["k"][0]
        self.assertTrue(0 < frontier < self.TOKENS and frontier % 32 == 0)
        codes, exact = coded["k.0.codes"][2], floats(coded["k.0.exact"][2], "e")
        scales, minima = floats(coded["k.0.scales"][2], "e"), floats(coded["k.0.zeros"][2], "e")
        self.assertEqual(coded["k.0.scales"][:2], ("F16", [self.HEADS, frontier // 32, self.DIM]))
        want = floats(decoded["k.0"][2])
        for head, token, channel in [(0, 0, 0), (1, 31, 63), (1, frontier - 1, 17)]:
            byte = codes[((head * frontier + token) * self.DIM + channel) * 2 // 8]
            code = byte >> 2 * (channel % 4) & 3
            at = (head * frontier // 32 + token // 32) * self.DIM + channel
            self.assertAlmostEqual(minima[at] + code * scales[at], want[(token * self.HEADS + head) * self.DIM + channel], delta=1e-6)
        for head, token, channel in [(0, frontier, 0), (1, 149, 63)]:
            at = (head * (self.TOKENS - frontier) + token - frontier) * self.DIM + channel
            self.assertEqual(exact[at], want[(token * self.HEADS + head) * self.DIM + channel])

    def test_k_and_v_alone_and_other_dtypes(self):
        count = self.TOKENS * self.HEADS * self.DIM
        half = struct.pack(f"<{count}e", *self.rows["k.0"])
        write_safetensors(self.input, {"k": ("F16", [self.TOKENS, self.HEADS, self.DIM], half), "v": ("F16", [self.TOKENS, self.HEADS, self.DIM], half)})
        good("encode", self.input, self.coded, "--kv-cache-dtype", "f16")
        good("decode", self.coded, self.decoded)
        self.assertEqual(floats(read_safetensors(self.decoded)[0]["v.0"][2]), floats(half, "e"))
        self.refused("encode", self.input, self.coded, "--kv-cache-dtype", "f16", "-m", MODEL, says=["1 layers", "8 layers"])

    def test_bad_input(self):
        def encode(tensors, *says):
            write_safetensors(self.input, tensors)
            self.refused("encode", self.input, self.coded, "--kv-cache-dtype", "int8", says=says)

        row = ("F32", [1, 1, 64], bytes(256))
        encode({"k.0": row}, "v.0", "missing")
        encode({"k.0": row, "v.1": row}, "v.0")
        encode({"k": row, "v": row, "w": row}, '"w"', "left over")
        encode({"k.0": row, "v.0": ("F32", [2, 1, 64], bytes(512))}, "[2, 1, 64]")
        encode({"k.0": ("F32", [64], bytes(256)), "v.0": ("F32", [64], bytes(256))}, "[64]")
        encode({"k.0": ("U8", [1, 1, 64], bytes(64)), "v.0": ("U8", [1, 1, 64], bytes(64))}, "U8")
        encode({"k.0": ("F32", [1, 1, 64], struct.pack("<f", float("nan")) * 64), "v.0": row}, "layer 0", "nan")
        encode({}, "no tensors")
        self.refused("encode", self.dir / "none", self.coded, "--kv-cache-dtype", "int8", says=["none"])
        write_safetensors(self.input, {"k.0": row, "v.0": row})
        self.refused("encode", self.input, self.coded, "--kv-cache-dtype", "kivi3", says=["kivi3"])
        self.refused("decode", self.input, self.decoded, says=["metadata format"])

        good("encode", self.input, self.coded, "--kv-cache-dtype", "int8")
        whole = self.coded.read_bytes()
        self.coded.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        self.refused("decode", self.coded, self.decoded, says=["SHA-256", "coded.safetensors"])
        for old, new, says in [(b'"tokens":"1"', b'"tokens":"9"', "[1, 9, 64]"), (b'\\"kv_heads\\":1', b'\\"kv_heads\\":0', "kv_heads"),
                               (b'livequant.rows', b'livequant.cows', "livequant.cows"), (b'\\"k\\":[1]', b'\\"k\\":[0]', "frontiers"),
                               (b'"version":"1"', b'"version":"2"', "version")]:
            self.assertIn(old, whole)
            self.coded.write_bytes(whole.replace(old, new))
            self.refused("decode", self.coded, self.decoded, says=[says])


class Inspect(Case):
    def test_everything_that_it_takes(self):
        shown = json.loads(good("inspect", MODEL, "--json"))
        self.assertEqual((shown["kind"], shown["refused"], shown["config"]["layers"]), ("model directory", [], 8))
        self.assertEqual(sum(t["bytes"] for t in shown["tensors"]), shown["tensor_bytes"])
        self.assertIn("context", shown)
        self.assertEqual(json.loads(good("inspect", MODEL / "model.safetensors", "--json"))["dtypes"], shown["dtypes"])
        policy = self.dir / "p.json"
        policy.write_text(json.dumps(json.loads(good("run", "-p", "Hi", "--print-config", "--kv-cache-dtype", "kivi2"))["policy"]["kivi2"]))
        self.assertIn("schema_digest", json.loads(good("inspect", policy, "--json")))
        policy.write_text('{"version": 1, "base": "kivi3"}')
        code, out, _ = run("inspect", policy)
        self.assertEqual(code, 1)
        self.assertIn("kivi3", out)
        self.refused("inspect", self.dir / "none", says=["none"])

    def test_says_what_would_be_refused(self):
        for name in ["config.json", "tokenizer.json", "model.safetensors"]:
            shutil.copy(MODEL / name, self.dir / name)
        config = json.loads((MODEL / "config.json").read_text())
        (self.dir / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
        (self.dir / "tokenizer.json").unlink()
        code, out, _ = run("inspect", self.dir, "--json")
        self.assertEqual(code, 1)
        refused = json.loads(out)["refused"]
        self.assertEqual(len(refused), 2)
        self.assertIn("model.layers.8", refused[0])
        self.assertIn("tokenizer.json", refused[1])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
