#!/usr/bin/env python3
"""What users do, through the binary: good runs, stable JSON, and every kind of bad input.

    cli_test.py BINARY SOURCE_DIR
"""
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

BINARY, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])
MODEL = SOURCE / "models/books-7m"
PRESETS = ["f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "kivi4", "kivi2", "kivi2_sync", "qserve8", "qserve4"]
CONTEXT_FIELDS = {"version", "commit", "model", "task", "data_hash", "context_length", "policy", "schema_digest", "contract", "kernels",
                  "backend", "hardware", "threads", "seed", "baseline", "allow_fallback", "fallback_calls", "command"}


def run(*args, stdin="", env=None):
    done = subprocess.run([BINARY, *map(str, args)], input=stdin if isinstance(stdin, bytes) else stdin.encode(), capture_output=True,
                          env={**os.environ, **(env or {})})
    return done.returncode, done.stdout, done.stderr.decode(errors="replace")


def run_json(*args, **kw):
    code, out, err = run(*args, "--json", **kw)
    assert code == 0, f"{args}: exit {code}: {err}"
    return json.loads(out)


class Case(unittest.TestCase):
    def refused(self, code, *args, says=(), **kw):
        got, out, err = run(*args, **kw)
        self.assertEqual(got, code, f"{args}: {err}")
        self.assertNotIn("invariant broken", err)
        for word in says:
            self.assertIn(word, err)
        return err

    def check_context(self, result):
        context = result["context"]
        self.assertEqual(CONTEXT_FIELDS - set(context), set())
        for name, kernels in context["kernels"].items():
            self.assertEqual({k["phase"] for k in kernels}, {"prefill", "decode", "verify"}, name)
            for k in kernels:
                self.assertTrue(k["attention"] and k["layers"], name)
        return context


class Run(Case):
    def test_every_preset_answers(self):
        for preset in PRESETS:
            r = run_json("run", "-p", "It was a dark and stormy night", "-n", 12, "--kv-cache-dtype", preset)
            self.assertEqual(len(r["token_ids"]), 12, preset)
            self.assertGreater(r["prefill_tokens_per_s"], 0)
            self.assertGreater(r["decode_tokens_per_s"], 0)
            self.assertEqual(r["cache_bytes"], r["ledger_bytes"] + r["slack_bytes"], preset)
            self.assertIn(preset, self.check_context(r)["schema_digest"])

    def test_text_streams_and_equals_json(self):
        args = ["run", "-p", "The old man looked at the sea", "-n", 24, "--temp", "0.8", "--seed", "7"]
        code, out, err = run(*args)
        self.assertEqual(code, 0, err)
        self.assertEqual(out.decode().rstrip("\n"), run_json(*args)["text"].rstrip("\n"))
        self.assertIn("tokens/s", err)

    def test_same_seed_same_tokens_whatever_the_threads_and_chunks(self):
        prompt = (MODEL / "eval/heldout_books.txt").read_text()[:2500]
        base = ["run", "-n", 16, "--temp", "1", "--seed", "3", "--kv-cache-dtype", "kivi2"]
        first = run_json(*base, stdin=prompt)["token_ids"]
        self.assertEqual(first, run_json(*base, "-t", "1", "--prefill-chunk", "37", stdin=prompt)["token_ids"])
        self.assertNotEqual(first, run_json(*base[:-3], "4", "--kv-cache-dtype", "kivi2", stdin=prompt)["token_ids"])

    def test_prompt_longer_than_the_context_names_both_numbers(self):
        self.refused(2, "run", "-n", 4, "--max-model-len", 64, stdin="word " * 500, says=["64"])
        err = self.refused(2, "run", "-n", 9000, "-p", "Hi", says=["9000", "8192"])
        self.assertIn("context", err)

    def test_pool_too_small_names_both_numbers(self):
        self.refused(1, "run", "-p", "Hi", "-n", 2000, "--kv-cache-memory", "100KiB", says=["102400"])

    def test_bad_flags(self):
        self.refused(2, "run", "-p", "", "-n", 1, says=["empty prompt"])
        self.refused(2, "run", "-n", 1, stdin="", says=["empty prompt"])
        self.refused(2, "run", "-p", "Hi", "-n", -1)
        self.refused(2, "run", "-p", "Hi", "-n", "x")
        self.refused(2, "run", "-p", "Hi", "--temp", "-1")
        self.refused(2, "run", "-p", "Hi", "--top-p", "0", says=["top-p"])
        self.refused(2, "run", "-p", "Hi", "--kv-cache-dtype", "kivi3", says=["kivi3", "kivi4"])
        self.refused(2, "run", "-p", "Hi", "--kv-cache-memory", "lots", says=["lots"])
        self.refused(2, "run", "-p", "Hi", "--kv-cache-dtype-skip-layers", "99", says=["99"])
        self.refused(2, "run", "-p", "Hi", "--contract", "sometimes", says=["sometimes"])
        self.refused(2, "run", "-p", "Hi", "--no-such-flag")
        self.refused(2)
        self.refused(1, "run", "-p", "Hi", "-m", "/nonexistent/model", says=["/nonexistent/model"])

    def test_prompt_that_is_not_utf8(self):
        self.refused(2, "run", "-n", 1, stdin=b"good \xff\xfe bad", says=["UTF-8", "5"])

    def test_unwritable_output(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([BINARY, "run", "-p", "Hi", "-n", "4"], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"cannot be written", done.stderr)

    def test_ctrl_c_ends_with_130(self):
        p = subprocess.Popen([BINARY, "run", "-p", "Once", "-n", "8000", "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        p.stdout.read(8)
        p.send_signal(signal.SIGINT)
        _, err = p.communicate(timeout=120)
        self.assertEqual(p.returncode, 130, err)

    def test_a_coding_that_no_kernel_reads_is_an_error_unless_allowed(self):
        with tempfile.TemporaryDirectory() as tmp:
            policy = json.loads(json.dumps(run_json("run", "-p", "Hi", "-n", 1, "--kv-cache-dtype", "int4")["context"]["policy"]["int4"]))
            text = json.dumps(policy).replace('"bits": 4', '"bits": 3')
            path = pathlib.Path(tmp) / "int3.json"
            path.write_text(text)
            code, _, err = run("run", "-p", "Hi", "-n", 2, "--kv-cache-dtype", path)
            self.assertNotEqual(code, 0)
            self.assertIn("--allow-fallback", err)
            r = run_json("run", "-p", "Hi", "-n", 2, "--kv-cache-dtype", path, "--allow-fallback")
            self.assertGreater(r["context"]["fallback_calls"], 0)


class Eval(Case):
    def test_perplexity_of_several_formats(self):
        r = run_json("eval", "perplexity", "-c", 512, "--max-tokens", 2044, "--kv-cache-dtype", "f32,int8,kivi2")
        self.assertEqual([x["format"] for x in r["results"]], ["f32", "int8", "kivi2"])
        for x in r["results"]:
            self.assertEqual(x["tokens"], 2044)
            self.assertEqual(x["contract"], "stepwise")
        self.assertEqual(r["results"][0]["mean_kld"], 0)
        self.assertEqual(r["results"][0]["same_top_p"], 1)
        self.assertLess(r["results"][1]["mean_kld"], r["results"][2]["mean_kld"])
        self.assertEqual(self.check_context(r)["baseline"], "f32")

    def test_contracts_and_protocols(self):
        for contract in ["chunk:128", "prompt"]:
            r = run_json("eval", "perplexity", "-c", 512, "--max-tokens", 1022, "--kv-cache-dtype", "kivi2", "--contract", contract)
            self.assertEqual(r["results"][0]["contract"], contract)
        self.assertLess(r["results"][0]["mean_kld"], 1e-6)  # in one shot every row is read exact: rounded to f16, no more
        r = run_json("eval", "perplexity", "-c", 256, "--max-tokens", 1024, "--kv-cache-dtype", "f16", "--protocol", "llama.cpp")
        self.assertGreater(r["results"][0]["perplexity"], 1)
        self.refused(2, "eval", "perplexity", "--protocol", "mine", says=["mine"])
        self.refused(2, "eval", "perplexity", "-c", 100000, "--max-tokens", 64, says=["100000", "8192"])

    def test_reference_logits(self):
        golden = json.loads((MODEL / "eval/reference.json").read_text())["golden_fp32"]
        ids = ",".join(map(str, golden["prompt_ids"]))
        r = run_json("eval", "logits", "--token-ids", ids, "--positions", "63", "--generate", 64)
        logits = r["positions"][0]["logits"]
        top = sorted(range(len(logits)), key=lambda i: -logits[i])[:10]
        self.assertEqual(top, golden["top10_ids"])
        for i, want in zip(top, golden["top10_logits"]):
            self.assertAlmostEqual(logits[i], want, delta=2e-3)
        for got, want in zip(logits, golden["logits_first16"]):
            self.assertAlmostEqual(got, want, delta=2e-3)
        self.assertEqual(r["generated"], golden["greedy_ids"])
        self.check_context(r)

    def test_logits_bad_input(self):
        self.refused(2, "eval", "logits", "--token-ids", "1,2,999999", says=["999999", "4095"])
        self.refused(2, "eval", "logits", "--token-ids", "1,2", "--positions", "2", says=["2"])
        self.refused(2, "eval", "logits", "--token-ids", "/no/such/file", says=["/no/such/file"])
        self.refused(2, "eval", "logits", "--token-ids", "")
        self.refused(2, "eval")


def embedded_model_as(directory, changes, drop=(), plant=None):
    """The embedded model in `directory` with other fields in its config.json. plant(layer name prefix) -> {name: f32 values}: tensors
    that are added to each layer."""
    config = json.loads((MODEL / "config.json").read_text())
    config.update(changes)
    for field in drop:
        del config[field]
    pathlib.Path(directory, "config.json").write_text(json.dumps(config))
    shutil.copy(MODEL / "tokenizer.json", directory)
    data = (MODEL / "model.safetensors").read_bytes()
    if plant:
        size = struct.unpack("<Q", data[:8])[0]
        header, body = json.loads(data[8:8 + size]), data[8 + size:]
        for layer in range(config["num_hidden_layers"]):
            for name, values in plant(f"model.layers.{layer}.", config).items():
                raw = struct.pack(f"<{len(values)}f", *values)
                header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(body), len(body) + len(raw)]}
                body += raw
        text = json.dumps(header).encode()
        data = struct.pack("<Q", len(text)) + text + body
    pathlib.Path(directory, "model.safetensors").write_bytes(data)


class Architectures(Case):
    GOLDEN = SOURCE / "tests/model/golden"

    def test_logits_and_greedy_tokens_are_those_of_transformers(self):
        for name in ["llama_bias", "llama_rope_yarn_attention", "mistral_window", "qwen2_layers", "qwen3"]:
            golden = json.loads((self.GOLDEN / name / "golden.json").read_text())
            ids = ",".join(map(str, golden["prompt"]))
            for dtype in ["f32", "f16"]:
                r = run_json("eval", "logits", "-m", self.GOLDEN / name, "--token-ids", ids, "--positions",
                             ",".join(map(str, golden["positions"])), "--generate", len(golden["greedy"]), "--kv-cache-dtype", dtype)
                self.assertEqual(r["generated"], golden["greedy"], name)
                for got, want in zip(r["positions"], golden["logits"][dtype], strict=True):
                    self.assertLess(max(abs(a - b) for a, b in zip(got["logits"], want, strict=True)), 1e-3, (name, dtype))
                self.check_context(r)

    def test_a_window_is_the_models(self):
        prompt = (MODEL / "eval/heldout_books.txt").read_text()[:3000]
        with tempfile.TemporaryDirectory() as tmp:
            embedded_model_as(tmp, {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 130},
                              drop=["attention_bias", "mlp_bias"])
            base = ["run", "-m", tmp, "-n", 64, "--ignore-eos", "--kv-cache-dtype"]
            r = run_json(*base, "kivi4", stdin=prompt)
            policy = self.check_context(r)["policy"]["kivi4"]
            self.assertEqual([layer["window"] for layer in policy["layers"]], [130])
            self.assertEqual(r["cache_bytes"], r["ledger_bytes"] + r["slack_bytes"])
            self.assertLess(r["cache_bytes"] * 2, run_json("run", *base[3:], "kivi4", stdin=prompt)["cache_bytes"])
            whole, cut = (run_json(*base, "int4", "--prefill-chunk", n, stdin=prompt) for n in (512, 7))
            self.assertEqual(whole["token_ids"], cut["token_ids"])
            p = run_json("eval", "perplexity", "-m", tmp, "-c", 512, "--max-tokens", 1022, "--kv-cache-dtype", "f16,int8", "-f",
                         MODEL / "eval/heldout_books.txt")
            self.assertLess(p["results"][0]["mean_kld"], 1e-5)
            self.assertLess(p["results"][1]["mean_kld"], 0.1)
            wide = pathlib.Path(tmp, "wide.json")
            wide.write_text('{"version": 1, "base": "f16", "window": 0}')
            self.refused(2, *base, wide, stdin=prompt, says=["window", "130"])
            embedded_model_as(tmp, {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
                              drop=["attention_bias", "mlp_bias"])
            self.refused(2, *base, "kivi2", stdin=prompt, says=["kivi2", "128", "window of 64"])

    def test_what_a_config_says_and_we_do_not_do_is_refused_by_name(self):
        for changes, says in [({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", "Qwen3ForCausalLM"]),
                              ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic"]),
                              ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30"]),
                              ({"attention_bias": True}, ["k_proj.bias", "missing"])]:
            with tempfile.TemporaryDirectory() as tmp:
                embedded_model_as(tmp, changes)
                self.refused(1, "run", "-m", tmp, "-p", "Hi", "-n", 1, says=says)

    def test_a_key_spike_is_warned_of_once(self):
        def bias(prefix, config):
            kv = config["num_key_value_heads"] * config["head_dim"]
            k = [0.0] * kv
            if prefix == "model.layers.3.":
                k[config["head_dim"] + 31] = 900.0  # KV head 1; the slowest pair, which RoPE hardly turns
            q = config["num_attention_heads"] * config["head_dim"]
            return {prefix + "self_attn." + n + "_proj.bias": v
                    for n, v in [("q", [0.0] * q), ("k", k), ("v", [0.0] * kv), ("o", [0.0] * config["hidden_size"])]}

        with tempfile.TemporaryDirectory() as tmp:
            embedded_model_as(tmp, {"attention_bias": True}, plant=bias)
            args = ["run", "-m", tmp, "-p", "It was a dark and stormy night", "-n", 8, "--kv-cache-dtype"]
            code, _, err = run(*args, "int4")
            self.assertEqual(code, 0, err)
            self.assertEqual(err.count("warning:"), 1, err)
            self.assertIn("layer 3, head 1", err)
            for command in [args, ["eval", "logits", "-m", tmp, "--token-ids", "0,5,9,11", "--kv-cache-dtype"]]:
                spike = run_json(*command, "int4")["key_spike"]
                self.assertEqual((spike["layer"], spike["head"], spike["channel"]), (3, 1, 31))
                self.assertGreater(spike["largest"], 30 * spike["median"])
            r = run_json("eval", "perplexity", "-m", tmp, "-c", 64, "--max-tokens", 126, "--kv-cache-dtype", "f16,qserve4,kivi4", "-f",
                         MODEL / "eval/heldout_books.txt")
            self.assertEqual([f["key_spike"] and f["key_spike"]["layer"] for f in r["results"]], [None, 3, None])
            code, _, err = run(*args, "f16")
            self.assertNotIn("warning:", err)


class Ledger(Case):
    ARTICLE = ["ledger", "--layers", 32, "--kv-heads", 8, "--head-dim", 128, "--tokens", 4096]

    def test_the_article_and_kivi(self):
        mib = 1 << 20
        r = run_json(*self.ARTICLE, "--kv-cache-dtype", "kivi2_sync")
        self.assertEqual(r["total_bytes"], 109 * mib)
        self.assertEqual(r["terms"], {"codes": 62 * mib, "qparams": 31 * mib, "residual": 16 * mib, "sparse": 0, "exact_prefix": 0, "pages": 0})
        for key in ["bytes_per_token", "decode_read_bytes", "slack_bytes", "workspace_bytes", "artifact_bytes", "shared_bytes"]:
            self.assertIn(key, r)
        self.check_context(r)
        self.assertEqual(run_json(*self.ARTICLE, "--kv-cache-dtype", "kivi2")["total_bytes"], int(102.5 * mib))
        self.assertEqual(run_json(*self.ARTICLE, "--kv-cache-dtype", "f16")["total_bytes"], 512 * mib)
        code, out, _ = run(*self.ARTICLE, "--kv-cache-dtype", "kivi2_sync")
        self.assertIn(b"109 MiB", out)

    def test_reads_and_memory(self):
        r = run_json(*self.ARTICLE, "--kv-cache-dtype", "f16", "--generate", 256)
        self.assertAlmostEqual(r["cumulative_read_bytes"]["before_append"] / 2**30, 131.984, delta=5e-4)
        self.assertAlmostEqual(r["cumulative_read_bytes"]["new_row_included"] / 2**30, 132.016, delta=5e-4)
        r = run_json(*self.ARTICLE, "--kv-cache-dtype", "int4", "--memory", "1GiB")
        self.assertGreaterEqual(r["memory"]["requests"], 7)
        self.assertGreater(r["memory"]["tokens_of_one_request"], 4096 * 7)

    def test_without_a_format_those_that_do_not_fit_are_named_and_the_others_counted(self):
        shape = ["ledger", "--layers", 2, "--kv-heads", 2, "--head-dim", 80]
        r = run_json(*shape)
        self.assertEqual([x["format"] for x in r["results"]], [p for p in PRESETS if not p.startswith("kivi")])
        self.assertEqual(sorted(r["refused"]), sorted(p for p in PRESETS if p.startswith("kivi")))
        self.assertIn("head_dim 80", r["refused"]["kivi2"])
        self.refused(2, *shape, "--kv-cache-dtype", "kivi2", says=["group 32", "head_dim 80"])

    def test_a_windowed_model_costs_its_windows(self):
        golden = SOURCE / "tests/model/golden/mistral_window"
        args = ["ledger", "-m", golden, "--kv-cache-dtype", "f16", "--tokens"]
        # 16 rows of 2 layers, K and V, one head of 32 f16 values.
        self.assertEqual(run_json(*args, 4096)["total_bytes"], 16 * 2 * 2 * 32 * 2)
        self.assertEqual(run_json(*args, 10)["total_bytes"], 10 * 2 * 2 * 32 * 2)

    def test_memory_is_what_a_run_is_given(self):
        # What fits according to the ledger runs in exactly that budget; one page fewer is refused with both numbers.
        r = run_json("ledger", "--kv-cache-dtype", "kivi2", "--tokens", 600, "--memory", "4MiB")
        tokens = r["memory"]["tokens_of_one_request"]
        ok = run_json("run", "-p", "Hi", "-n", 4, "--kv-cache-dtype", "kivi2", "--max-model-len", min(tokens, 8192), "--kv-cache-memory", "4MiB")
        self.assertLessEqual(ok["pool_bytes"], 4 << 20)

    def test_bad_input(self):
        self.refused(2, "ledger", "--layers", 32, says=["--kv-heads"])
        self.refused(2, "ledger", "--kv-cache-dtype", "nope", says=["nope"])
        self.refused(2, "ledger", "--tokens", -1)
        self.refused(2, "ledger", "--layers", 4, "--kv-heads", 2, "--head-dim", 80, "--kv-cache-dtype", "kivi4", says=["80", "32"])


class Policy(Case):
    def policy(self, text):
        path = pathlib.Path(tempfile.mkdtemp()) / "policy.json"
        path.write_text(text)
        self.addCleanup(shutil.rmtree, path.parent)
        return path

    def test_a_policy_printed_is_a_policy_read(self):
        shown = run_json("run", "-p", "Hi", "-n", 2, "--kv-cache-dtype", "kivi2")
        path = self.policy(json.dumps(shown["context"]["policy"]["kivi2"]))
        again = run_json("run", "-p", "Hi", "-n", 2, "--kv-cache-dtype", path)
        self.assertEqual(list(again["context"]["schema_digest"].values()), list(shown["context"]["schema_digest"].values()))

    def test_broken_policies(self):
        for text in ["", "{", "[]", "{\"nope\": 1}", "{\"base\": \"kivi2\", \"base\": \"int4\"}", "nul", "{\"base\": 3}"]:
            self.refused(2, "run", "-p", "Hi", "--kv-cache-dtype", self.policy(text))
        self.refused(2, "run", "-p", "Hi", "--kv-cache-dtype", "/no/such/policy.json", says=["/no/such/policy.json"])


class BadModels(Case):
    """Each damage is an error that names the file and the thing, never a crash."""

    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.dir)
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]:
            shutil.copy(MODEL / name, self.dir / name)
        os.symlink(MODEL / "model.safetensors", self.dir / "model.safetensors")

    def damaged(self, says):
        start = time.monotonic()
        self.refused(1, "run", "-m", self.dir, "-p", "Hi", "-n", 1, says=says)
        return time.monotonic() - start

    def config(self, **changes):
        config = json.loads((MODEL / "config.json").read_text())
        for key, value in changes.items():
            config.pop(key) if value is KeyError else config.update({key: value})
        (self.dir / "config.json").write_text(json.dumps(config))

    def test_config(self):
        for change, says in [({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"), ({"hidden_act": "gelu"}, "gelu"),
                             ({"rope_scaling": {"rope_type": "longrope", "factor": 4}, "rope_parameters": KeyError}, "longrope"), ({"num_attention_heads": 0}, "num_attention_heads"),
                             ({"num_key_value_heads": 3}, "num_key_value_heads"), ({"hidden_size": -1}, "hidden_size"),
                             ({"vocab_size": 1 << 40}, "vocab_size"), ({"rms_norm_eps": 0}, "rms_norm_eps"), ({"head_dim": KeyError, "hidden_size": 257}, "hidden_size"),
                             ({"intermediate_size": "704"}, "intermediate_size"), ({"attention_bias": True}, "k_proj.bias"),
                             ({"num_hidden_layers": 9}, "layers.8"), ({"num_hidden_layers": 7}, "layers.7")]:
            self.config(**change)
            self.damaged([says])
        (self.dir / "config.json").write_text("{")
        self.damaged(["config.json"])
        (self.dir / "config.json").unlink()
        self.damaged(["config.json"])

    def test_tokenizer(self):
        whole = (MODEL / "tokenizer.json").read_text()
        for text in ["", whole[:1000], "{}", whole.replace('"BPE"', '"WordPiece"'), whole.replace('"Isolated"', '"Sideways"'),
                     whole.replace("\\\\p{N}|", "(((|")]:
            self.assertNotEqual(text, whole)
            (self.dir / "tokenizer.json").write_text(text)
            self.damaged(["tokenizer.json"])

    def test_safetensors(self):
        whole = (MODEL / "model.safetensors").read_bytes()
        size = struct.unpack("<Q", whole[:8])[0]
        header = json.loads(whole[8:8 + size])
        first = next(k for k in header if k != "__metadata__")

        def with_header(h, tail=whole[8 + size:]):
            text = json.dumps(h).encode() if not isinstance(h, bytes) else h
            return struct.pack("<Q", len(text)) + text + tail

        renamed = {("model.layers.0.self_attn.x_proj.weight" if k == "model.layers.0.self_attn.q_proj.weight" else k): v for k, v in header.items()}
        reshaped = {**header, first: {**header[first], "shape": [header[first]["shape"][0], 1 << 40]}}
        moved = {**header, first: {**header[first], "data_offsets": [0, 1 << 50]}}
        for name, data in [("empty", b""), ("short", whole[:5]), ("cut header", whole[:200]), ("cut body", whole[:-1]),
                           ("huge header", struct.pack("<Q", 1 << 60) + whole[8:]), ("not json", with_header(b"hello")),
                           ("trailing", whole + b"x"), ("renamed", with_header(renamed)), ("reshaped", with_header(reshaped)),
                           ("moved", with_header(moved)), ("bad dtype", with_header({**header, first: {**header[first], "dtype": "Q7"}}))]:
            with self.subTest(name):
                (self.dir / "model.safetensors").unlink()
                (self.dir / "model.safetensors").write_bytes(data)
                self.damaged([])

    def test_a_nan_weight_refuses_the_append(self):
        whole = bytearray((MODEL / "model.safetensors").read_bytes())
        size = struct.unpack("<Q", whole[:8])[0]
        header = json.loads(whole[8:8 + size])
        start, end = header["model.layers.3.self_attn.v_proj.weight"]["data_offsets"]
        whole[8 + size + start:8 + size + end] = b"\xff\x7f" * ((end - start) // 2)
        (self.dir / "model.safetensors").unlink()
        (self.dir / "model.safetensors").write_bytes(whole)
        self.damaged(["layer 3"])


class Doctor(Case):
    def test_names_a_kernel_for_every_preset_and_phase(self):
        r = run_json("doctor")
        self.assertEqual(sorted(r["formats"]), sorted(PRESETS))
        for name, kernels in r["formats"].items():
            self.assertEqual({k["phase"] for k in kernels}, {"prefill", "decode", "verify"}, name)
        code, out, _ = run("doctor")
        self.assertEqual(code, 0)
        for preset in PRESETS:
            self.assertIn(preset.encode(), out)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=1)
