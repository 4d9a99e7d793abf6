#!/usr/bin/env python3
"""`run --prompts` and `run -i` through the binary: batches equal single runs, turns equal fresh runs, bad input is named.

    batch_chat_test.py BINARY SOURCE_DIR
"""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

BINARY, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
MODEL = SOURCE / "models/books-7m"
BOOKS = (MODEL / "eval/heldout_books.txt").read_text()
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def run(*args, stdin=""):
    done = subprocess.run([BINARY, *map(str, args)], input=stdin if isinstance(stdin, bytes) else stdin.encode(), capture_output=True, timeout=120,
                          env={**os.environ, "LIVEQUANT_MODEL": str(MODEL)})
    return done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace")


def good(*args, stdin=""):
    code, out, err = run(*args, stdin=stdin)
    assert code == 0, f"{args}: exit {code}: {err}{out}"
    return out


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.dir)

    def windowed(self):
        """The embedded model with queries that see 130 rows."""
        config = json.loads((MODEL / "config.json").read_text()) | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 130}
        model = self.dir / "windowed"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        for name in ["tokenizer.json", "model.safetensors"]:
            os.symlink(MODEL / name, model / name)
        return model

    def refused(self, code, *args, says=(), stdin=""):
        got, out, err = run(*args, stdin=stdin)
        self.assertEqual(got, code, f"{args}: {err}")
        self.assertEqual(out, "")
        for word in says:
            self.assertIn(word, err)


class Batch(Case):
    def file(self, *lines):
        path = self.dir / "prompts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    def test_eight_requests_equal_eight_runs(self):
        requests = [{"prompt": BOOKS[3000 * i:3000 * i + 40 + 170 * i], "n": 6 + 3 * i, "seed": i, "temp": i % 3 * 0.7, "id": i} for i in range(8)]
        requests[2] |= {"top_k": 12, "top_p": 0.9}
        del requests[5]["seed"], requests[5]["n"], requests[5]["id"]
        path = self.file(*requests)
        for preset in ["f16", "kivi2", "qserve4"]:
            common = ["-n", 9, "--seed", 77, "--kv-cache-dtype", preset]
            got = [json.loads(line) for line in good("run", "--prompts", path, "--batch", 8, *common).splitlines()]
            self.assertEqual([x["id"] for x in got], [0, 1, 2, 3, 4, None, 6, 7])
            for request, x in zip(requests, got):
                more = [f for key, flag in [("n", "-n"), ("seed", "--seed"), ("temp", "--temp"), ("top_k", "--top-k"), ("top_p", "--top-p")]
                        if key in request for f in (flag, request[key])]
                flags = {str(f): v for f, v in zip((common + more)[::2], (common + more)[1::2])}
                want = json.loads(good("run", *(w for pair in flags.items() for w in pair), "--json", stdin=request["prompt"]))
                for key in ["text", "token_ids", "finish_reason", "prompt_tokens"]:
                    self.assertEqual(x[key], want[key], (preset, key, request))

    def test_eight_requests_in_a_window_equal_eight_runs(self):
        model = self.windowed()
        requests = [{"prompt": BOOKS[2000 * i:2000 * i + 60 + 260 * i], "n": 8 + i} for i in range(8)]
        for preset in ["f16", "int4"]:
            common = ["-m", model, "--kv-cache-dtype", preset]
            got = [json.loads(line) for line in good("run", "--prompts", self.file(*requests), "--batch", 8, *common).splitlines()]
            for request, x in zip(requests, got):
                want = json.loads(good("run", *common, "-n", request["n"], "--json", stdin=request["prompt"]))
                self.assertEqual([x[k] for k in ["text", "token_ids", "finish_reason", "prompt_tokens"]],
                                 [want[k] for k in ["text", "token_ids", "finish_reason", "prompt_tokens"]], (preset, request))

    def test_json_and_how_many_at_once(self):
        path = self.file(*({"prompt": BOOKS[500 * i:500 * i + 300], "n": 20} for i in range(6)))
        wide = json.loads(good("run", "--prompts", path, "--max-num-seqs", 6, "--json"))
        self.assertEqual(wide["most_at_once"], 6)
        self.assertEqual(wide["new_tokens"], sum(len(x["token_ids"]) for x in wide["results"]))
        self.assertEqual(wide["context"]["contract"], "stepwise")
        self.assertEqual(len(wide["context"]["data_hash"]), 64)
        tight = json.loads(good("run", "--prompts", path, "--max-num-seqs", 6, "--kv-cache-memory", wide["pool_bytes"] // 2, "--json"))
        self.assertLess(tight["most_at_once"], 6)
        self.assertLessEqual(tight["pool_bytes"], wide["pool_bytes"] // 2)
        for a, b in zip(wide["results"], tight["results"]):
            self.assertEqual(a, b)

    def test_bad_lines_are_named_and_nothing_runs(self):
        fine = {"prompt": "Once"}
        for bad, says in [("{", "syntax"), ("", "byte 0"), ("[]", "object"), ({"prompt": 3}, "prompt is 3"), ({"prompt": ""}, "prompt is empty"),
                          ({"id": "x"}, "no prompt"), ({"prompt": "a", "max_tokens": 3}, "max_tokens"), ({"prompt": "a", "n": -1}, "-1"),
                          ({"prompt": "a", "n": 1.5}, "1.5"), ({"prompt": "a", "n": 1 << 64}, "n is"), ({"prompt": "a", "temp": "hot"}, "hot"),
                          ({"prompt": "a", "temp": 1000}, "1000"), ({"prompt": "a", "top_p": 0}, "top-p"), ({"prompt": "a", "seed": -1}, "-1"),
                          ({"prompt": "a", "id": []}, "id is"), ('{"prompt": "a", "prompt": "b"}', "prompt"),
                          ({"prompt": "word " * 500, "n": 9000}, "8192"), ('{"prompt": "\\ud800"}', "line 2")]:
            self.refused(2, "run", "--prompts", self.file(fine, bad, fine), says=["line 2", says])
        self.refused(2, "run", "--prompts", self.file(fine, {"prompt": "word " * 60}), "--max-model-len", 40, "-n", 4, says=["line 2", "and 4", "40"])
        self.refused(2, "run", "--prompts", self.file(), says=["no request"])
        self.refused(2, "run", "--prompts", "/no/such/file", says=["/no/such/file"])
        self.refused(1, "run", "--prompts", self.file(fine), "--kv-cache-memory", "1KiB", says=["1024"])
        self.refused(2, "run", "--prompts", self.file(fine), "-p", "x")
        self.refused(2, "run", "--prompts", self.file(fine), "--batch", 0)
        self.refused(2, "run", "-p", "x", "--batch", 4, says=["--prompts"])

    def test_ctrl_c_prints_what_there_is(self):
        path = self.file({"prompt": "Once", "n": 1}, {"prompt": "Once", "n": 8000})
        p = subprocess.Popen([BINARY, "run", "--prompts", path, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        first = p.stdout.readline()
        p.send_signal(signal.SIGINT)
        rest, err = p.communicate(timeout=120)
        self.assertEqual(p.returncode, 130, err)
        self.assertEqual(json.loads(first)["finish_reason"], "length")
        self.assertEqual(json.loads(rest)["finish_reason"], "cancelled")


class Chat(Case):
    def with_template(self, text=TEMPLATE):
        for file in MODEL.iterdir():
            if file.suffix in (".json", ".safetensors"):
                os.symlink(file, self.dir / file.name)
        (self.dir / "chat_template.jinja").write_text(text)
        return self.dir

    def check_turns(self, chat, preset, model=MODEL):
        """Each turn's tokens are what a fresh run on the same ids gives."""
        for turn in chat["turns"]:
            self.assertEqual(turn["reused_rows"] + turn["prefilled_rows"], len(turn["prompt_token_ids"]))
            fresh = json.loads(good("eval", "logits", "-m", model, "--token-ids", ",".join(map(str, turn["prompt_token_ids"])), "--positions", 0,
                                    "--generate", len(turn["token_ids"]), "--kv-cache-dtype", preset, "--json"))
            self.assertEqual(turn["token_ids"], fresh["generated"])

    def test_text_goes_on(self):
        lines = [BOOKS[:700].replace("\n", " "), " And then", "", " so"]
        for preset in ["f16", "kivi2"]:
            chat = json.loads(good("run", "-i", "-n", 24, "--ignore-eos", "--kv-cache-dtype", preset, "--json", stdin="\n".join(lines)))
            self.assertFalse(chat["chat_template"])
            self.assertEqual(len(chat["turns"]), 4)
            self.check_turns(chat, preset)
            for before, turn in zip(chat["turns"], chat["turns"][1:]):
                self.assertEqual(turn["prompt_token_ids"][:len(before["prompt_token_ids"]) + 24], before["prompt_token_ids"] + before["token_ids"])
                self.assertEqual(turn["reused_rows"], before["cache_rows"])
            self.assertEqual(chat["turns"][2]["prefilled_rows"], 1)  # the empty line

    def test_turns_in_a_window(self):
        model = self.windowed()
        lines = [BOOKS[:1500].replace("\n", " "), " And then " + BOOKS[4000:4900].replace("\n", " "), "", " so"]
        for preset in ["f16", "int4"]:
            chat = json.loads(good("run", "-i", "-m", model, "-n", 24, "--ignore-eos", "--kv-cache-dtype", preset, "--json", stdin="\n".join(lines)))
            self.assertGreater(len(chat["turns"][0]["prompt_token_ids"]), 260)
            self.check_turns(chat, preset, model)
            for before, turn in zip(chat["turns"], chat["turns"][1:]):
                self.assertEqual(turn["reused_rows"], before["cache_rows"])

    def test_the_models_template(self):
        model = self.with_template()
        lines = ["Tell me of the sea. " * 12, "And the ship?", "", "Why?"]
        for preset in ["int4", "kivi2"]:
            args = ["run", "-i", "-m", model, "-n", 20, "--kv-cache-dtype", preset, "--system", "You are a sailor."]
            chat = json.loads(good(*args, "--json", stdin="\n".join(lines) + "\n"))
            self.assertTrue(chat["chat_template"])
            self.assertEqual(len(chat["turns"]), 3)  # an empty line says nothing
            self.check_turns(chat, preset, model)
            self.assertGreater(sum(t["reused_rows"] for t in chat["turns"]), 0)
            code, out, err = run(*args, stdin="\n".join(lines) + "\n")
            self.assertEqual((code, out), (0, "".join(t["text"] + "\n" for t in chat["turns"])))
            for turn in chat["turns"]:
                self.assertIn(f"{turn['reused_rows']} rows reused, {turn['prefilled_rows']} prefilled", err)

    def test_the_template_in_a_gguf_file(self):
        model, file = self.with_template(), self.dir / "model.gguf"
        subprocess.run([sys.executable, SOURCE / "tools/make_gguf.py", model, file, "--type", "bf16"], check=True)
        args = ["run", "-i", "-n", 12, "--system", "You are a sailor."]
        self.assertEqual(*(good(*args, "-m", m, stdin="Tell me of the sea.\nAnd the ship?\n") for m in (model, file)))

    def test_a_template_that_rewrites_the_past(self):
        # Answers are left out of the past: the kept rows agree up to the first answer only.
        model = self.with_template("{{ bos_token }}{% for m in messages if m.role == 'user' %}{{ m.content }}. {% endfor %}")
        for preset in ["f16", "kivi2"]:
            chat = json.loads(good("run", "-i", "-m", model, "-n", 20, "--kv-cache-dtype", preset, "--json", stdin="The sea\nThe ship\nThe night\n"))
            self.check_turns(chat, preset, model)
            for before, turn in zip(chat["turns"], chat["turns"][1:]):
                self.assertLess(turn["reused_rows"], before["cache_rows"])
                self.assertGreaterEqual(turn["reused_rows"], len(before["prompt_token_ids"]) - 1)

    def test_bad_turns_do_not_end_it(self):
        code, out, err = run("run", "-i", "-n", 8, "--max-model-len", 60, stdin=b"Once\n" + b"word " * 100 + b"\nbad \xff\n upon\n")
        self.assertEqual(code, 1)
        self.assertIn("60", err)
        self.assertIn("UTF-8", err)
        self.assertEqual(err.count("[turn"), 2)
        good("run", "-i", stdin="")
        broken = self.with_template("{% for %}")
        self.refused(2, "run", "-i", "-m", broken, stdin="Hi\n", says=["line 1"])
        (broken / "chat_template.jinja").write_text("{{ raise_exception('no system here') }}")
        self.refused(1, "run", "-i", "-m", broken, stdin="Hi\n", says=["no system here"])

    def test_bad_flags(self):
        self.refused(2, "run", "-i", "-p", "x")
        self.refused(2, "run", "-i", "--prompts", "x")
        self.refused(2, "run", "-p", "x", "--system", "y", says=["interactive"])
        self.refused(2, "run", "-i", "--system", "y", stdin="Hi\n", says=["chat template"])
        self.refused(2, "run", "-i", "--contract", "chunk:64", stdin="Hi\n", says=["chunk:64"])

    def test_ctrl_c_ends_the_answer_and_not_the_program(self):
        p = subprocess.Popen([BINARY, "run", "-i", "-n", "3000", "--ignore-eos"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        p.stderr.readline()  # the greeting
        p.stdin.write(b"Once\n")
        p.stdin.flush()
        p.stdout.read(8)
        p.send_signal(signal.SIGINT)
        self.assertIn(b"; cancelled]", p.stderr.readline())
        _, err = p.communicate(b" upon a time\n", timeout=300)
        self.assertEqual(p.returncode, 0, err)
        self.assertIn(b"3000 new tokens", err)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=1)
