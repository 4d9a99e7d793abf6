#!/usr/bin/env python3
"""Runs every promise of the README that takes minutes, prints what it saw, and keeps it under docs/results/.

    tools/release_check.py [--only NAME,...] [--build build] [--out docs/results]

Needs build/release (with benchmarks) and build/dev: scripts/test.sh --full makes both. Exit 1 if a promise is broken. Speeds are printed
beside their targets and ceilings; a missed speed is reported as missed, it does not hide among the failures.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "models/books-7m"


class Check:
    def __init__(self, args):
        self.release, self.dev = args.build / "release", args.build / "dev"
        self.rows, self.failed = [], 0
        self.data = {}
        self.commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()

    def row(self, name, good, seen, kind="promise"):
        verdict = "pass" if good else ("missed" if kind == "speed" else "FAIL")
        self.failed += not good and kind != "speed"
        self.rows.append([name, verdict, seen, self.commit])
        print(f"{verdict:6s} {name}: {seen}", flush=True)

    def livequant(self, *args):
        start = time.monotonic()
        model = ["-m", MODEL.relative_to(ROOT)] if args[0] == "eval" else []
        command = [os.path.relpath(self.release / "livequant", ROOT), *args, *model, "--json"]  # results name no machine's folders
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT)
        if done.returncode != 0:
            raise RuntimeError(f"livequant {args}: exit {done.returncode}: {done.stderr}")
        return json.loads(done.stdout), time.monotonic() - start

    def reference(self):
        golden = json.loads((MODEL / "eval/reference.json").read_text())
        g = golden["golden_fp32"]
        r, _ = self.livequant("eval", "logits", "--token-ids", ",".join(map(str, g["prompt_ids"])), "--positions", 63, "--generate", 64)
        logits = r["positions"][0]["logits"]
        top = sorted(range(len(logits)), key=lambda i: -logits[i])[:10]
        worst = max([abs(logits[i] - w) for i, w in zip(g["top10_ids"], g["top10_logits"])]
                    + [abs(a - b) for a, b in zip(logits, g["logits_first16"])])
        self.row("f32 top-10 ids", top == g["top10_ids"], top)
        self.row("f32 logits within 2e-3", worst <= 2e-3, f"max abs difference {worst:.2e}")
        self.row("64 greedy tokens", r["generated"] == g["greedy_ids"], f"{len(r['generated'])} equal" if r["generated"] == g["greedy_ids"] else r["generated"])
        for context in (2048, 8192):
            want = golden["perplexity"][f"fp32_context_{context}"]["perplexity"]
            r, seconds = self.livequant("eval", "perplexity", "-c", context, "--kv-cache-dtype", "f32")
            got = r["results"][0]["perplexity"]
            self.row(f"perplexity at {context} within 0.1 %", abs(got / want - 1) <= 1e-3, f"{got:.5f}, reference {want} ({(got / want - 1) * 100:+.5f} %), {seconds:.0f} s")

    def quality(self):
        formats = "f32,bf16,fp8_e4m3,int8,kivi4,kivi2,qserve4,int4"
        r, seconds = self.livequant("eval", "perplexity", "-c", 2048, "--max-tokens", 131008, "--kv-cache-dtype", formats)
        self.data["quality"] = r
        kld = {x["format"]: x["mean_kld"] for x in r["results"]}
        for x in r["results"]:
            print(f"       {x['format']:9s} ppl {x['perplexity']:.5f}  mean KLD {x['mean_kld']:.3e}  same top-1 {x['same_top_p'] * 100:.3f} %")
        order = ["bf16", "int8", "kivi4", "fp8_e4m3", "qserve4"]
        good = all(kld[a] < kld[b] for a, b in zip(order, order[1:])) and kld["qserve4"] < min(kld["kivi2"], kld["int4"])
        self.row("mean KLD ordered bf16 < int8 < kivi4 < fp8_e4m3 < qserve4 < {kivi2, int4}", good, ", ".join(f"{k} {v:.2e}" for k, v in kld.items()))
        self.row("131008 tokens x 8 formats in under 6 minutes", seconds < 360, f"{seconds:.0f} s", "speed")

    def ledger(self):
        args = ["ledger", "--layers", 32, "--kv-heads", 8, "--head-dim", 128, "--tokens", 4096, "--kv-cache-dtype"]
        for preset, mib in [("kivi2_sync", 109), ("kivi2", 102.5), ("f16", 512), ("int8", 260), ("qserve4", 136)]:
            r, _ = self.livequant(*args, preset)
            self.row(f"ledger {preset}", r["total_bytes"] == mib * 2**20, f"{r['total_bytes'] / 2**20} MiB, expected {mib}")

    def owner(self):
        env = {**os.environ, "LIVEQUANT_OWNER_OPS": "2000000"}
        start = time.monotonic()
        done = subprocess.run([self.dev / "tests/cache/owner/owner_test", "--gtest_filter=*Random*"], capture_output=True, text=True, env=env)
        tail = [l for l in done.stdout.split("\n") if l.strip()]
        self.data["owner"] = done.stdout[-6000:]
        self.row("random owner test, 2 million operations", done.returncode == 0, f"{time.monotonic() - start:.0f} s; {tail[-1] if tail else ''}")

    def plants(self):
        plants = list(self.dev.glob("tests/cache/owner/*plants_test"))
        for program in plants:
            done = subprocess.run([program], capture_output=True, text=True)
            self.data["plants"] = done.stdout[-6000:]
            caught = [l for l in done.stdout.split("\n") if l.startswith("  k") and ": operation " in l]
            self.row("planted bugs", done.returncode == 0 and len(caught) >= 14, f"{len(caught)} planted, all caught" if done.returncode == 0 else done.stdout[-500:])
        self.row("planted bugs were run", bool(plants), f"{len(plants)} program")

    def hostile(self):
        kept = self.release / "hostile.json"
        done = subprocess.run([sys.executable, ROOT / "tools/hostile_check.py", "--livequant", self.release / "livequant", "--json", kept], capture_output=True, text=True)
        bad = [l for l in done.stdout.split("\n") if l.startswith("FAIL")]
        rows = json.loads(kept.read_text())
        self.data["hostile"] = rows
        slowest, largest = max(r["seconds"] for r in rows), max(r["mib"] for r in rows)
        self.row("hostile files, texts and templates: each in under 1 s of processor time and 64 MiB", done.returncode == 0,
                 bad or f"{len(rows)} inputs, at most {slowest} s and {largest} MiB")

    def step(self):
        done = subprocess.run([self.release / "bench/step_bench", MODEL.relative_to(ROOT), "1024", str(min(2, os.cpu_count()))], capture_output=True, text=True,
                              cwd=ROOT)
        r = json.loads(done.stdout)
        self.data["step"] = r
        for x in r["results"]:
            self.row(f"decode step at 1024, {x['format']}, within 2x of its reads", x["ratio"] <= 2,
                     f"{x['ratio']:.2f}x: {x['step_us']:.0f} us against {x['read_us']:.0f} us for {(x['weight_bytes'] + x['cache_read_bytes']) / 1e6:.1f} MB from {x['cache_level']}", "speed")


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--build", type=lambda p: pathlib.Path(p).resolve(), default=ROOT / "build")
    ap.add_argument("--out", type=pathlib.Path, default=ROOT / "docs/results")
    ap.add_argument("--only", default="reference,quality,ledger,owner,plants,hostile,step",
                    help="checks to run; rows of the others stay as they were")
    args = ap.parse_args()
    check = Check(args)
    for name in args.only.split(","):
        print(f"-- {name}", flush=True)
        getattr(check, name)()
    cpu = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.machine())
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "release.json"
    old = json.loads(kept.read_text()) if kept.exists() else {"rows": []}
    fresh = {r[0]: r for r in check.rows}
    order = [r[0] for r in old["rows"]] + [r[0] for r in check.rows]
    rows = [fresh.get(n) or next(r for r in old["rows"] if r[0] == n) for n in dict.fromkeys(order)]
    head = f"{datetime.date.today()}, {os.cpu_count()} x {cpu}. Command: `scripts/test.sh --full` (`tools/release_check.py`); each row names its commit."
    table = "\n".join(f"| {' | '.join(map(str, r))} |" for r in rows)
    (args.out / "release.md").write_text(f"# Release check\n\n{head}\n\n| promise | verdict | seen | commit |\n|---|---|---|---|\n{table}\n")
    kept.write_text(json.dumps({**old, "head": head, "rows": rows, **check.data}, indent=1) + "\n")
    print(f"{sum(v == 'pass' for _, v, *_ in check.rows)} passed, {check.failed} failed")
    sys.exit(1 if check.failed else 0)


if __name__ == "__main__":
    main()
