#!/usr/bin/env python3
"""check_layers must see what it is for: plants violations in a copy of src/ and expects each to be named."""
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# (file to append to, line, what the message must name)
PLANTS = [
    ("numeric/dtype.h", '#include "schema/schema.h"', "numeric includes schema"),
    ("cache/owner/owner.h", '#include "kernels/matmul.h"', "owner includes kernels"),
    ("cache/owner/owner.h", "inline double Weight() { return 1.0; }", "never sees a float"),
    ("numeric/CMakeLists.txt", "lq_library(numeric SRCS x.cc DEPS lq::kv)", "DEPS names lq::kv"),
    ("text/CMakeLists.txt", "lq_library(text SRCS x.cc DEPS lq::base)", "text includes io"),
    ("model/llama.h", "#include <CLI/CLI.hpp>", "belongs to apps"),
    ("../python/module.cc", '#include "kv/kv_cache.h"', "python/ includes kv/kv_cache.h"),
]


def run(root):
    done = subprocess.run([sys.executable, str(ROOT / "tools/check_layers.py"), "--root", str(root)], capture_output=True, text=True)
    return done.returncode, done.stdout


def main():
    failures = 0
    for name, line, expected in PLANTS:
        with tempfile.TemporaryDirectory() as tmp:
            root = pathlib.Path(tmp)
            shutil.copytree(ROOT / "src", root / "src")
            shutil.copytree(ROOT / "apps", root / "apps")
            shutil.copytree(ROOT / "python", root / "python")
            code, _ = run(root)
            if code != 0:
                print("the unchanged tree is not clean")
                return 1
            with open(root / "src" / name, "a") as f:
                f.write("\n" + line + "\n")
            code, out = run(root)
            if code == 0 or expected not in out:
                print(f"planted in {name}: {line!r} was not reported as {expected!r}:\n{out}")
                failures += 1
    print(f"{len(PLANTS) - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
