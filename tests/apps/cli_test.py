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
                             ({"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_parameters": KeyError}, "yarn"), ({"num_attention_heads": 0}, "num_attention_heads"),
                             ({"num_key_value_heads": 3}, "num_key_value_heads"), ({"hidden_size": -1}, "hidden_size"),
                             ({"vocab_size": 1 << 40}, "vocab_size"), ({"rms_norm_eps": 0}, "rms_norm_eps"), ({"head_dim": KeyError, "hidden_size": 257}, "hidden_size"),
                             ({"intermediate_size": "704"}, "intermediate_size"), ({"attention_bias": True}, "attention_bias"),
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
