#!/usr/bin/env python3
"""`run --beams` and `run --speculate` through the binary: the same tokens as without, what is reported, what is refused.

    search_test.py BINARY SOURCE_DIR
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

BINARY, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
MODEL = SOURCE / "models/books-7m"
BOOKS = (MODEL / "eval/heldout_books.txt").read_text()
REPEATS = "The tide was out and the boats lay still. " * 6 + "The tide was"


def run(*args, stdin=""):
    done = subprocess.run([BINARY, *map(str, args)], input=stdin.encode(), capture_output=True, timeout=120,
                          env={**os.environ, "LIVEQUANT_MODEL": str(MODEL)})
    return done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace")


def good(*args, stdin=""):
    code, out, err = run(*args, stdin=stdin)
    assert code == 0, f"{args}: exit {code}: {err}{out}"
    return out


class Case(unittest.TestCase):
    def refused(self, code, *args, says=()):
        got, out, err = run(*args)
        self.assertEqual(got, code, f"{args}: {err}")
        self.assertEqual(out, "")
        for word in says:
            self.assertIn(word, err)


class Beams(Case):
    def test_hypotheses_come_best_first_and_twice_alike(self):
        for preset in ["f16", "kivi2"]:
            args = ["run", "-p", BOOKS[:700], "-n", 20, "--beams", 4, "--kv-cache-dtype", preset]
            out = json.loads(good(*args, "--json"))
            scores = [h["score"] for h in out["hypotheses"]]
            self.assertEqual(len(scores), 4)
            self.assertEqual(scores, sorted(scores, reverse=True))
            for h in out["hypotheses"]:
                self.assertAlmostEqual(h["score"], h["sum_logprob"] / 20)
                self.assertEqual((len(h["token_ids"]), h["finish_reason"]), (20, "length"))
            self.assertEqual(len({tuple(h["token_ids"]) for h in out["hypotheses"]}), 4)
            self.assertEqual(out["steps"], 19)
            self.assertEqual(out["cache_rows"], out["prompt_tokens"] + 19)
            self.assertLess(out["most_cache_bytes"], out["unshared_bytes"])
            self.assertEqual(out["beams_duplicated"], out["beams_dropped"])
            self.assertEqual(out["context"]["task"], "run")
            code, text, err = run(*args)
            self.assertEqual((code, text), (0, out["hypotheses"][0]["text"] + "\n"))
            self.assertIn("reorders", err)
            # A best sum is no worse than that of the greedy answer.
            greedy = json.loads(good(*args[:-4], "--kv-cache-dtype", preset, "--json"))
            one = json.loads(good(*args[:-4], "--beams", 1, "--kv-cache-dtype", preset, "--json"))["hypotheses"][0]
            self.assertEqual(one["token_ids"], greedy["token_ids"])
            self.assertGreaterEqual(out["hypotheses"][0]["sum_logprob"], one["sum_logprob"])

    def test_what_does_not_go_together_is_refused(self):
        self.refused(2, "run", "-p", "a", "--beams", 0, says=["--beams", "256"])
        self.refused(2, "run", "-p", "a", "--beams", 2, "--temp", 1, says=["--beams", "--temp"])
        self.refused(2, "run", "-p", "a", "--length-penalty", 1, says=["--beams"])
        self.refused(2, "run", "-i", "--beams", 2, says=["--beams"])
        self.refused(2, "run", "-p", "a", "--beams", 2, "--speculate", "ngram", says=["--beams"])
        self.refused(1, "run", "-p", "a", "--beams", 2, "--kv-cache-memory", "1KiB", says=["1024"])


class Speculate(Case):
    def test_outputs_are_the_plain_ones(self):
        for preset in ["f16", "int4", "kivi2", "qserve4"]:
            for sampling in [[], ["--temp", 0.8, "--seed", 5]]:
                args = ["run", "-p", REPEATS, "-n", 60, "--kv-cache-dtype", preset, "--json", *sampling]
                plain = json.loads(good(*args))
                self.assertIsNone(plain["speculation"])
                self.assertEqual(plain["pending_tokens"], 1)
                for more in [["--speculate", "ngram", "--prompt-lookup-max", 3], ["--speculate", MODEL, "--draft-max", 4]]:
                    out = json.loads(good(*args, *more))
                    for key in ["text", "token_ids", "finish_reason", "cache_rows", "pending_tokens", "cache_bytes"]:
                        if key == "cache_bytes":  # pages of rejected drafts may stay part filled, never more
                            self.assertGreaterEqual(out[key], plain["ledger_bytes"])
                        else:
                            self.assertEqual(out[key], plain[key], (preset, more, key))
                    s = out["speculation"]
                    self.assertEqual(out["decode_steps"] + s["accepted_tokens"], plain["decode_steps"])
                    self.assertAlmostEqual(s["acceptance_rate"], s["accepted_tokens"] / s["draft_tokens"])
                    self.assertEqual(sum(s["steps_by_accepted_tokens"]), out["decode_steps"])
                    if not sampling:
                        self.assertGreater(s["accepted_tokens"], 0)
                    if more[1] == MODEL and not sampling:  # the model itself, under the same cache
                        self.assertEqual(s["acceptance_rate"], 1)
                        self.assertEqual(s["draft_kv_cache_dtype"], preset)

    def test_a_line_says_how_often_drafts_were_right(self):
        code, out, err = run("run", "-p", REPEATS, "-n", 30, "--speculate", "ngram")
        self.assertEqual(code, 0)
        self.assertRegex(err, r"drafts +\d+ of \d+ tokens accepted \([\d.]+ %\), [\d.]+ tokens a step")

    def test_a_conversation_drafts_too(self):
        stdin = REPEATS + "\nand then\n"
        args = ["run", "-i", "-n", 25, "--json", "--kv-cache-dtype", "kivi2"]
        plain = json.loads(good(*args, stdin=stdin))["turns"]
        drafted = json.loads(good(*args, "--speculate", "ngram", stdin=stdin))["turns"]
        for a, b in zip(plain, drafted, strict=True):
            for key in ["text", "token_ids", "reused_rows", "cache_rows", "pending_tokens"]:
                self.assertEqual(a[key], b[key])
        self.assertGreater(sum(t["speculation"]["accepted_tokens"] for t in drafted), 0)

    def test_what_does_not_go_together_is_refused(self):
        self.refused(2, "run", "-p", "a", "--speculate", "", says=["--speculate is empty"])
        self.refused(2, "run", "-p", "a", "--speculate", "ngram", "--contract", "chunk:64", says=["chunk:64", "stepwise"])
        self.refused(2, "run", "-p", "a", "--speculate", "ngram", "--prompt-lookup-max", 2, "--prompt-lookup-min", 3,
                     says=["--prompt-lookup-min 3"])
        self.refused(2, "run", "-p", "a", "--num-speculative-tokens", 3, says=["--speculate"])
        self.refused(2, "run", "-p", "a", "--speculate", "no/such/model", says=["--speculate", "no/such/model"])
        with tempfile.TemporaryDirectory() as folder:
            other = pathlib.Path(folder) / "other"
            shutil.copytree(MODEL, other, ignore=shutil.ignore_patterns("eval"))
            text = (other / "tokenizer.json").read_text()
            (other / "tokenizer.json").write_text(text + " ")
            self.refused(2, "run", "-p", "a", "--speculate", other, says=["tokenizer", "is not that of"])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]])
